"""Small runs of verl's trainer mathematics beside each other: does a method help against a gap of this kind?"""
