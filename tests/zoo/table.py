"""stub"""
def write(o): pass
def difference(o): return ""
