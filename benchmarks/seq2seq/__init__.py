"""Encoder-decoder pairs behind their encoder: decoding with drafts against decoding without."""
