"""``thinwire check``: what is asked of every codec and scheme, tried on one."""
