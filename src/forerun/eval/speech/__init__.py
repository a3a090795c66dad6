"""`forerun eval asr`: word error rates of recordings, and what transcribing them costs, way by way."""
