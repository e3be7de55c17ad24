"""What a client may ask of an adaptation, a joining or a pick: fields, defaults and bounds, without torch.

The API validates requests with these models and publishes their schema. It imports nothing else of
`personalization`, so no module of this package imports torch or any module that does.
"""
