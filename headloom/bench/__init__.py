"""What is timed: layers, decoding, whole models, the training loop, and what they are compared with."""
