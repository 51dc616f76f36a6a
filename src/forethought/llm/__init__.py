"""Text in, text out.

* ``tokenizer.py`` ``detokenizer.py`` ``stops.py``  text to tokens, tokens to text, where text ends
* ``prompt.py`` ``transcript.py`` ``generation.py`` what came in, what one sample said, one request
* ``frontend.py``                                      between text and engine, for both LLMs
* ``llm.py`` ``session.py``                        for a program that waits
* ``async_llm.py`` ``async_session.py``            for many clients, over ``engine_thread.py``,
                                                   ``listener.py`` and ``gate.py``
"""
