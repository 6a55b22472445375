"""Property tests draw the same cases every time: a change is judged by what it did, not by luck.

`pytest --hypothesis-profile=explore` draws new ones: do that where you changed something.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore")
settings.load_profile("same")
