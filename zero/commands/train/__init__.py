"""`zero train`: a GPT is trained on the text of a file."""
