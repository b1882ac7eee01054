"""What every attention is: its dataflow, its bases, its options, and what of it folds into plain weights."""
