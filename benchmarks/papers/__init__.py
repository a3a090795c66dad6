"""The tables and figures of five papers on speculative decoding, made again: python -m benchmarks.papers --help"""
