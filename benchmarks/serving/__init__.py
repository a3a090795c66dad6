"""The server and its engine under the same load: what HTTP adds, and what drafts gain for clients."""
