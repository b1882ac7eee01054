"""One run: its resolved configuration, Hugging Face's Trainer, and a folder of records."""
