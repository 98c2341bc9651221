"""stub"""
class FewRows:
    registers = (40, 120, 160)
