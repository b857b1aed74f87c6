"""Room: readers. Saved files in, one RolloutBatch per step out."""
