"""Room: demo. The small live training run behind `collapsediag demo`."""
