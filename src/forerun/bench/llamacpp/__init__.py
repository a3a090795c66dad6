"""llama.cpp beside Forerun: the same GGUF file, threads and prompts, in turns with everything else."""
