"""Serve a bundle by HTTP as OpenAI's API has it: completions, chats, embeddings.

Needs the packages of the extra ``serve`` (starlette, uvicorn, jinja2), which are imported when a server starts:
``python -m compressor_runtime.server BUNDLE``, or ``compress serve BUNDLE``.

Invariant: the model is called on other threads than that of the connections; what a client sends is checked before a
request is made of it.
"""
