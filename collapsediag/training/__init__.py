"""What every live adapter needs and no trainer knows: patches, log windows, one monitor a job, checkpoints."""
