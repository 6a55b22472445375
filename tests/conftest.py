"""Property tests draw the same cases every time: a change is judged by what it did, not by luck.

`pytest --hypothesis-profile=explore` draws new ones: do that where you changed something. No deadline: on a
busy machine any case may take long.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")
