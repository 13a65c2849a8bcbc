// Serves targets most of whose files use modules: cmake/pch.h and their
// headers.
#pragma once
#include "cmake/pch.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
