"""stub"""
def drawings(s): return {}
def page(*a): return ""
