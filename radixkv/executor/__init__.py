"""From a Batch to token ids: K/V store, attention, sampling, Hugging Face models. Torch lives here."""
