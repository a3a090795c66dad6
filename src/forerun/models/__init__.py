"""A Hugging Face model as a scorer of token blocks. The only folder that knows transformers' insides."""
