// msa_ext._C: addresses and sizes in, launches out. The Python layer has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <tuple>

#include "host/device.h"
#include "host/fatbin.h"
#include "host/runtime.h"
#include "pipeline/backward.h"
#include "pipeline/forward.h"
#include "pipeline/main_kernels.h"

namespace py = pybind11;

namespace msa {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DqAccum parse_dq_accum(const std::string& name) {
  static const std::map<std::string, DqAccum> values = {
      {"bf16", DqAccum::kBf16}, {"fp16", DqAccum::kFp16}, {"fp32", DqAccum::kFp32}};
  return values.at(name);
}

std::string dq_accum_name(DqAccum dq_accum) {
  switch (dq_accum) {
    case DqAccum::kBf16:
      return "bf16";
    case DqAccum::kFp16:
      return "fp16";
    case DqAccum::kFp32:
      return "fp32";
  }
  return "";
}

// (T, Hq, Hkv, W, entries, rows, edge_capacity, work_capacity)
using SizesTuple = std::tuple<int64_t, int, int, int64_t, int, int, int64_t, int64_t>;
BackwardSizes to_sizes(const SizesTuple& t) {
  return std::apply([](auto... size) { return BackwardSizes{size...}; }, t);
}

// (address, row stride, head stride), strides in elements
using OperandTuple = std::tuple<uintptr_t, int64_t, int64_t>;
StridedOperand to_operand(const OperandTuple& t) {
  return {pointer<const __nv_bfloat16>(std::get<0>(t)), std::get<1>(t), std::get<2>(t)};
}

py::dict describe_device(int index) {
  const DeviceInfo& info = device_info(index);
  py::dict result;
  result["name"] = info.name;
  result["capability"] = py::make_tuple(info.major, info.minor);
  result["num_sms"] = info.num_sms;
  result["max_shared_bytes"] = info.max_shared_bytes;
  return result;
}

py::list describe_main_kernels() {
  py::list result;
  for (const MainKernel& kernel : main_kernels()) {
    py::list accums;
    for (const DqAccum accum : kernel.dq_accums) accums.append(dq_accum_name(accum));
    py::dict entry;
    entry["name"] = kernel.name;
    entry["major"] = kernel.major;
    entry["default_dq_accum"] = dq_accum_name(kernel.default_dq_accum);
    entry["dq_accums"] = accums;
    result.append(entry);
  }
  return result;
}

py::tuple plan_of(const WorkspacePlan& plan) {
  py::list sections;
  for (const Section& section : plan.sections) {
    sections.append(py::make_tuple(section.name, section.offset, section.bytes));
  }
  return py::make_tuple(plan.total_bytes, sections);
}

void run_backward(const std::string& backend, int device, uintptr_t stream, const SizesTuple& sizes,
                  const std::array<OperandTuple, 5>& operands, uintptr_t lse,
                  const std::array<uintptr_t, 7>& schedule, uintptr_t workspace,
                  const std::array<uintptr_t, 3>& gradients, bool kv_grad_fp32, float softmax_scale,
                  const std::string& dq_accum, uintptr_t flags, size_t guard_bytes,
                  uint32_t stages) {
  BackwardArguments a{};
  a.backend = backend;
  a.device = device;
  a.stream = pointer<CUstream_st>(stream);
  a.sizes = to_sizes(sizes);
  a.q = to_operand(operands[0]);
  a.grad_out = to_operand(operands[1]);
  a.out = to_operand(operands[2]);
  a.k = to_operand(operands[3]);
  a.v = to_operand(operands[4]);
  a.lse = pointer<const float>(lse);
  a.schedule.row_ptr = pointer<const int32_t>(schedule[0]);
  a.schedule.q_indices = pointer<const int32_t>(schedule[1]);
  a.schedule.items = pointer<const int32_t>(schedule[2]);
  a.schedule.work_count = pointer<const int32_t>(schedule[3]);
  a.schedule.cu_seqlens = pointer<const int32_t>(schedule[4]);
  a.schedule.document_workspace_starts = pointer<const int32_t>(schedule[5]);
  a.schedule.query_offsets = pointer<const int32_t>(schedule[6]);
  a.workspace = pointer<uint8_t>(workspace);
  a.dq = pointer<__nv_bfloat16>(gradients[0]);
  a.dk = pointer<void>(gradients[1]);
  a.dv = pointer<void>(gradients[2]);
  a.kv_grad_fp32 = kv_grad_fp32;
  a.softmax_scale = softmax_scale;
  a.dq_accum = parse_dq_accum(dq_accum);
  a.flags = pointer<uint32_t>(flags);
  a.guard_bytes = guard_bytes;
  const py::gil_scoped_release release;
  backward(a, stages);
}

void run_forward(const std::string& kernel, int device, uintptr_t stream,
                 const std::array<int, 5>& sizes, const std::array<OperandTuple, 3>& operands,
                 uintptr_t topk, const std::array<uintptr_t, 4>& layout,
                 const std::array<int, 2>& layout_sizes, const std::array<uintptr_t, 2>& results,
                 float softmax_scale) {
  ForwardArguments a{};
  a.kernel = kernel;
  a.device = device;
  a.stream = pointer<CUstream_st>(stream);
  a.softmax_scale = softmax_scale;
  ForwardParams& p = a.params;
  p.q = to_operand(operands[0]);
  p.k = to_operand(operands[1]);
  p.v = to_operand(operands[2]);
  p.topk = pointer<const int32_t>(topk);
  p.out = pointer<__nv_bfloat16>(results[0]);
  p.lse = pointer<float>(results[1]);
  p.layout.cu_seqlens = pointer<const int32_t>(layout[0]);
  p.layout.cu_seqlens_k = pointer<const int32_t>(layout[1]);
  p.layout.query_offsets = pointer<const int32_t>(layout[2]);
  p.layout.entry_documents = pointer<const int32_t>(layout[3]);
  p.layout.num_entries = layout_sizes[0];
  p.layout.num_documents = layout_sizes[1];
  p.layout.num_tokens = sizes[0];
  p.layout.num_keys = sizes[1];
  p.num_heads = sizes[2];
  p.num_kv_heads = sizes[3];
  p.top_k = sizes[4];
  const py::gil_scoped_release release;
  forward(a);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  check_runtime();
  module.doc() =
      "CUDA kernels and host pipeline of msa_ext; see msa_ext.backward for the public API.";
  module.def("built_archs", &built_archs,
             "Architectures embedded in this module, e.g. ['90a', '100a'].");
  module.def("device_count", &device_count, "Visible CUDA devices, 0 without a driver.");
  module.def("device_info", &describe_device, py::arg("index"),
             "Name, capability, SMs, shared bytes.");
  module.def("main_kernels", &describe_main_kernels, "The main kernels that are built.");
  module.def(
      "plan_walk",
      [](int num_tasks, int num_sms, int short_walk, int long_walk, int short_walk_max_tasks) {
        const Walk walk =
            plan_walk(num_tasks, num_sms, WalkRule{short_walk, long_walk, short_walk_max_tasks});
        return std::make_tuple(walk.tasks_per_cta, walk.full_ctas, walk.tail_tasks_per_cta,
                               walk.grid);
      },
      py::arg("num_tasks"), py::arg("num_sms"), py::arg("short_walk") = WalkRule{}.short_walk,
      py::arg("long_walk") = WalkRule{}.long_walk,
      py::arg("short_walk_max_tasks") = WalkRule{}.short_walk_max_tasks,
      "(tasks_per_cta, full_ctas, tail_tasks_per_cta, grid) of csrc/topology.h.");
  module.def(
      "plan_workspace",
      [](const SizesTuple& sizes, const std::string& dq_accum, size_t guard_bytes) {
        return plan_of(plan_backward(to_sizes(sizes), parse_dq_accum(dq_accum), guard_bytes));
      },
      py::arg("sizes"), py::arg("dq_accum"), py::arg("guard_bytes") = 0,
      "(total bytes, [(section, offset, bytes)]).");
  module.def("backward", &run_backward, py::arg("backend"), py::arg("device"), py::arg("stream"),
             py::arg("sizes"), py::arg("operands"), py::arg("lse"), py::arg("schedule"),
             py::arg("workspace"), py::arg("gradients"), py::arg("kv_grad_fp32"),
             py::arg("softmax_scale"), py::arg("dq_accum"), py::arg("flags"),
             py::arg("guard_bytes") = 0, py::arg("stages") = kAllStages,
             "Enqueues the backward on `stream` of the current device.");
  module.def(
      "forward_kernels",
      [] {
        std::vector<std::string> names;
        for (const ForwardKernel& kernel : forward_kernels()) names.push_back(kernel.name);
        return names;
      },
      "The forward kernels that are built.");
  module.def("forward", &run_forward, py::arg("kernel"), py::arg("device"), py::arg("stream"),
             py::arg("sizes"), py::arg("operands"), py::arg("topk"), py::arg("layout"),
             py::arg("layout_sizes"), py::arg("results"), py::arg("softmax_scale"),
             "Enqueues the forward on `stream` of the current device; sizes (T, Tk, Hq, Hkv, K), "
             "layout_sizes (entries, documents).");
}

}  // namespace msa
