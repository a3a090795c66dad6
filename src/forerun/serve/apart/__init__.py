"""HTTP in a process of its own: one interpreter for clients and another for the engine, so that neither waits for both.

The engine's process is the one that was started, that signals reach and that others know (`run`, `host`); the other
reads requests, writes answers and knows nothing but the model's tokenizer and numbers (`front`, `remote`). Between them
goes one message a round, with the tokens of all sequences (`wire`). A replica is called by Ray, so there the process
that reads requests is the one that was started, and starts the engine's (`engine_main`).
Each is a `process` to the other.
"""
