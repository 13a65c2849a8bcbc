// For targets most of whose files know modules: cmake/pch.h and those.
#pragma once
#include "cmake/pch.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
