"""The tables and figures of five papers on speculative decoding, made again: python -m benchmarks.papers --help"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself; read when torch is loaded
