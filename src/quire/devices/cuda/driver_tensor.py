"""Tensors of torch over addresses of a card, mapped or not.

By DLPack with the card named: torch then asks the driver nothing. An address that came as an array interface of CUDA
would be looked up, and refused without memory behind it. Making a tensor touches no address.

Cost: some 10 us.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["tensor_at"]

_CPU, _CUDA, _UINT = 1, 2, 1  # DLDeviceType, DLDataTypeCode


class _DeviceOfTensor(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _ElementType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _PlainTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DeviceOfTensor),
        ("ndim", ctypes.c_int32),
        ("dtype", _ElementType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _PlainTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_owned: dict[
    int, Any
] = {}  # by address of the structure: it, its shape, and the owner, until torch drops the tensor
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop(address: int) -> None:
    _owned.pop(address, None)


# torch may drop a tensor after this module has gone: the callback stays for ever.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_drop))


def tensor_at(address: int, num_bytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """uint8 [num_bytes] at these addresses of `device`; the tensor and all views of it keep `owner` alive."""
    shape = (ctypes.c_int64 * 1)(num_bytes)
    kind = _CUDA if device.type == "cuda" else _CPU
    managed = _ManagedTensor(
        _PlainTensor(
            address,
            _DeviceOfTensor(kind, device.index or 0),
            1,
            _ElementType(_UINT, 8, 1),
            ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        ),
        None,
        ctypes.cast(_drop, ctypes.c_void_p),
    )
    place = ctypes.addressof(managed)
    _owned[place] = managed, shape, owner
    return torch.from_dlpack(_new_capsule(place, b"dltensor", None))
