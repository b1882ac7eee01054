"""What every attention is: its dataflow, the bases it stands on, its options, and what of it folds into plain weights."""
