"""What the host objects of all operations share: their declaration (operation.py), the calls that they keep
(plans.py), and what their methods have in common (method.py).
"""
