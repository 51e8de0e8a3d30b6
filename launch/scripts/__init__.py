"""Scripts and manifests that start a run in containers elsewhere: text to be read, then used.

Each is a pure function of the plan and the launch settings. All start container/first_process.py
on every node, as SageMaker does.
"""
