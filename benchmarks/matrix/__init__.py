"""Options, drafters, rules, batches and contexts, each against decoding without it, in one run."""
