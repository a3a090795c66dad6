"""Is the text exactly the target's? Tests anybody can run on their own pair of target and drafter: `forerun.check`."""
