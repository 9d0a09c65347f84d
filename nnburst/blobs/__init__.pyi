from .nncache import NNCache as NNCache
