"""`headway deploy`: a cluster of several hosts through `ray up`, and applications on it."""
