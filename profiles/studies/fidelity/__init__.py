"""The accuracy study: does FP8 attention keep the quality of a model that was really trained?

``python -m profiles.studies.fidelity --help`` lists the steps; docs/fidelity.md says what they show.
"""
