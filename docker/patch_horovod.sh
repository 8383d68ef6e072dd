#!/usr/bin/env bash
# Patches the sources of Horovod 0.28.1, for the pinned TensorFlow. docker/build_horovod.sh and a test call it.
#
#   docker/patch_horovod.sh horovod-0.28.1
set -euo pipefail

source=$1
sed -i '/xla_mpi_ops\.cc/d' "$source/horovod/tensorflow/CMakeLists.txt"
# Saves a quarter of the build's CPU time: no debug symbols, and no Gloo of an older C++ standard, which nothing links.
sed -i 's/RelWithDebInfo/Release/' "$source/setup.py"
sed -i 's/^    add_subdirectory(third_party\/gloo)$/    add_subdirectory(third_party\/gloo EXCLUDE_FROM_ALL)/' "$source/CMakeLists.txt"
# g++ 14 (Debian 13) refuses three files: two lack a header, one assigns a constant.
sed -i 's/^#include <string>$/#include <stdexcept>\n&/' "$source/horovod/common/common.h"
sed -i 's/^#include <unordered_map>$/#include <string>\n&/' "$source/horovod/common/group_table.h"
sed -i 's/const size_type count_;/size_type count_;/' \
  "$source/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
# This TensorFlow has platform_specific_handle() instead of AsGpuStreamValue().
sed -i -e 's/^GpuStreamHandle AsGpuStreamValue/static &/' \
  -e '/^#undef LOG/a\
#if HAVE_GPU\
namespace stream_executor::gpu {\
static GpuStreamHandle AsGpuStreamValue(Stream* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}\
}\
#endif' "$source/horovod/tensorflow/mpi_ops.cc"
# Horovod connects the ranks by the host's own name, which is 127.0.1.1 on many hosts. The first patch uses the interface
# that horovodrun found. The second reports an error where Horovod would crash.
sed -i '/^void GlooContext::InitializeForProcessSet/,/^}/s/iface = gloo_iface_;/iface = global_context.gloo_iface_;/' \
  "$source/horovod/common/gloo/gloo_context.cc"
sed -i 's/GLOO_ENFORCE_NE(rv, -1);/GLOO_ENFORCE_EQ(rv, 0, "No address for this host: ", attr.hostname);/' \
  "$source/third_party/gloo/gloo/transport/tcp/device.cc"
