"""Room: scoring. Pairs in, one log-likelihood matrix out."""
