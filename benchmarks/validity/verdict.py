"""What the numbers of the last full study say, in words. Read the tables again before changing a word."""

VERDICT = """..."""
