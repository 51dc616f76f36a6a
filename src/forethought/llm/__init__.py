"""Text in, text out.

* ``tokenizer.py`` text to token ids, and what callers may give as a prompt
* ``detokenizer.py`` token ids to text as they arrive, up to a stop string
* ``grammar.py`` JSON schemas, expressions and grammars to constraints of the next token
* ``thinking.py`` thinking budgets to constraints, in front of those of a grammar
* ``tool_format.py`` how models write calls of tools; ``call_reader.py`` reads them from a
  ``growing_text.py`` by ``call_formats.py``, ``call_grammar.py`` forces one; ``response.py`` whole
  messages
* ``profile.py`` what a model's files say of how it is to be used
* ``frontend.py`` requests in, outputs out, over one engine; for both LLMs
* ``llm.py`` ``LLM`` and ``Session``: the caller's thread steps the engine
* ``async_llm.py`` ``async_session.py`` ``AsyncLLM`` and ``AsyncSession``: an ``engine_thread.py``
  steps it for the clients of any event loop
"""
