"""`forerun serve`: the HTTP interface of OpenAI over one engine. Needs `pip install 'forerun[serve]'`.

From the outside inwards: `app` routes and reports errors, `schemas` says what a request may hold, `translate` makes
engine requests of it, `service` runs them within limits, `answer_text` decides what may be sent, `formats` writes it.
Behind the service is a `backend`: the engine in a thread of the same process, or over a socket in another (`apart`).
"""
