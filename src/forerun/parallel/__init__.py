"""A target that is split over several processes (tensor parallel): rank 0 decodes, the other ranks repeat its passes.

See docs/parallel.md. `serve_passes` is for scripts under torchrun whose rank 0 streams or runs an engine.
"""

from forerun.parallel.coordinator import Coordinator
from forerun.parallel.draft import load_draft
from forerun.parallel.join import join, serve_passes
from forerun.parallel.together import examine_split
from forerun.parallel.worker import Worker

__all__ = ["Coordinator", "Worker", "examine_split", "join", "load_draft", "serve_passes"]
