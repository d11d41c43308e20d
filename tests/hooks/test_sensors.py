"""Sensors beside the records: read from made-up kernels and devices, and from this machine's."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from resihp.contracts import Op, SensorSample, TelemetryBatch
from resihp.contracts.sensors import SENSOR_NAMES
from resihp.hooks import CudaClock, HostClock
from resihp.hooks._device_sensors import device_sensors
from resihp.hooks._heartbeat import HeartbeatSender
from resihp.hooks._kernel_sensors import kernel_sensors
from resihp.hooks._sampler import Sampler
from resihp.hooks._sensor import Quantity, Sensor
from resihp.hooks._spans import Recording
from resihp.hooks._stats import FailureLog

THREAD = 77


class Kernel:
    """Files of a kernel, in a folder; whatever is not written is not there."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc, self.sys = root, root / "proc", root / "sys"
        self.now_s = 0.0
        self.recording = Recording(FailureLog(), HostClock().now_ns, None, look_for_cuda=False)
        self.recording.thread_id = THREAD
        self.sampler = Sampler(self.recording, find=self.sensors, now_s=lambda: self.now_s)

    def sensors(self, thread: int) -> list[Sensor]:
        return kernel_sensors(thread, proc=self.proc, sys=self.sys)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroups(self, *mounts: str, of: str) -> None:
        """Mounts as `VERSION ROOT POINT CONTROLLERS`, and the cgroups of the process."""
        lines = []
        for mount in mounts:
            version, top, point, controllers = mount.split()
            kind = "cgroup2" if version == "2" else "cgroup"
            place = f"31 23 0:28 {top} {self.root}/{point} rw,relatime shared:9"
            lines.append(f"{place} - {kind} {kind} rw,{controllers}")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "\n".join(lines))
        self.write("proc/self/cgroup", of)

    def throttled_v1(self, folder: str, *, times: int, seconds: float, quota: int = 50_000) -> None:
        self.write(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
        self.write(f"{folder}/cpu.cfs_period_us", "100000\n")
        counts = f"nr_periods 900\nnr_throttled {times}\nthrottled_time {round(seconds * 1e9)}\n"
        self.write(f"{folder}/cpu.stat", counts)

    def throttled_v2(self, folder: str, *, times: int, seconds: float, limit: str) -> None:
        self.write(f"{folder}/cpu.max", f"{limit} 100000\n")
        counts = f"usage_usec 5\nnr_throttled {times}\nthrottled_usec {round(seconds * 1e6)}\n"
        self.write(f"{folder}/cpu.stat", counts)

    def thread(self, *, waited_s: float = 0.0, cpu: int = 0) -> None:
        self.write(f"proc/self/task/{THREAD}/schedstat", f"999 {round(waited_s * 1e9)} 5\n")
        self.write(f"proc/self/task/{THREAD}/stat", _stat(cpu=cpu))

    def after(self, seconds: float) -> SensorSample | None:
        """The sample after some seconds, in which all sensors were read once a second."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            self.sampler.tick()
        sample = self.sampler.sample()
        if sample is not None:
            self.sampler.keep()
        return sample


def _stat(*, cpu: int = 0, faults: int = 0) -> str:
    numbers = [str(number) for number in range(3, 53)]
    numbers[0], numbers[9], numbers[36] = "R", str(faults), str(cpu)
    return f"{THREAD} (a name) with) spaces) {' '.join(numbers)}\n"


@pytest.fixture
def kernel(tmp_path) -> Kernel:
    return Kernel(tmp_path)


def started(kernel: Kernel) -> Kernel:
    kernel.sampler.tick()
    return kernel


def test_a_machine_without_any_of_the_files_has_no_sensors(kernel):
    assert started(kernel).after(2.0) is None
    assert kernel.recording.failures.count == 0


def test_throttling_of_a_cgroup_of_version_1(kernel):
    kernel.cgroups(
        "1 / cg/cpu cpu,cpuacct", "1 / cg/memory memory", of="4:memory:/m\n2:cpu,cpuacct:/job/a\n"
    )
    kernel.throttled_v1("cg/cpu/job/a", times=10, seconds=5.0, quota=-1)
    kernel.throttled_v1("cg/cpu/job", times=0, seconds=0.0)
    assert started(kernel).after(2.0) == SensorSample(seconds=2.0, cpu_throttled=0.0, cpu_quota=0.5)
    kernel.throttled_v1("cg/cpu/job", times=20, seconds=1.24)  # by the quota of the one above
    assert kernel.after(2.0).cpu_throttled == 0.62


def test_throttling_of_a_cgroup_of_version_2_and_its_pressure(kernel):
    kernel.cgroups("2 / cg nsdelegate", of="0::/job/a\n")
    kernel.throttled_v2("cg/job/a", times=0, seconds=0.0, limit="25000")
    kernel.throttled_v2("cg/job", times=0, seconds=0.0, limit="max")
    kernel.write("cg/cpu.stat", "usage_usec 17\n")  # the topmost one has no quota
    for what in ("cpu", "memory"):
        text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0 total=9\n"
        kernel.write(f"cg/job/a/{what}.pressure", text)
        kernel.write(f"proc/pressure/{what}", text.replace("1000000", "77000000"))
    assert started(kernel).after(1.0).cpu_quota == 0.25
    kernel.throttled_v2("cg/job/a", times=10, seconds=0.75, limit="25000")
    kernel.write("cg/job/a/memory.pressure", "some avg10=1.00 total=1500000\n")
    kernel.write("proc/pressure/cpu", "some avg10=1.00 total=99000000\n")
    sample = kernel.after(1.0)
    assert (sample.cpu_throttled, sample.memory_pressure, sample.cpu_pressure) == (0.75, 0.5, 0.0)
    assert sample.io_pressure is None


def test_the_threads_of_a_process_are_not_throttled_longer_than_the_periods_last(kernel):
    kernel.cgroups("2 / cg -", of="0::/job\n")
    kernel.throttled_v2("cg/job", times=100, seconds=0.0, limit="400000")
    started(kernel)
    kernel.throttled_v2("cg/job", times=105, seconds=8.0, limit="400000")  # of 16 threads
    assert kernel.after(1.0).cpu_throttled == 0.5


@pytest.mark.parametrize("membership", ["0::/\n", "0::/../other\n", "0::/docker/abc\n"])
def test_the_cgroup_of_a_container_is_the_top_of_its_mount(kernel, membership):
    kernel.cgroups("2 /docker/abc cg -", of=membership)
    kernel.throttled_v2("cg", times=0, seconds=0.0, limit="10000")
    started(kernel)
    kernel.throttled_v2("cg", times=10, seconds=0.4, limit="10000")
    assert kernel.after(1.0).cpu_throttled == 0.4


def test_the_quota_of_a_container_limits_the_cgroups_in_it(kernel):
    kernel.cgroups("2 / cg -", of="0::/init.scope\n")
    kernel.throttled_v2("cg", times=0, seconds=0.0, limit="200000")
    kernel.throttled_v2("cg/init.scope", times=0, seconds=0.0, limit="max")
    assert started(kernel).after(1.0).cpu_quota == 2.0
    kernel.throttled_v2("cg", times=10, seconds=0.4, limit="200000")
    assert kernel.after(1.0).cpu_throttled == 0.4


def test_a_move_to_another_cgroup_is_no_jump(kernel):
    kernel.cgroups("1 / cg/cpu cpu", of="2:cpu:/one\n")
    kernel.throttled_v1("cg/cpu/one", times=5, seconds=2.0)
    kernel.throttled_v1("cg/cpu/two", times=9_000, seconds=800.0)
    kernel.write("proc/pressure/cpu", "some avg10=1.00 total=5\n")
    assert started(kernel).after(1.0).cpu_throttled == 0.0
    kernel.write("proc/self/cgroup", "2:cpu:/two\n")
    assert kernel.after(1.0).cpu_throttled == 0.0
    kernel.throttled_v1("cg/cpu/two", times=9_010, seconds=800.3)
    assert kernel.after(1.0).cpu_throttled == 0.3
    assert kernel.recording.failures.count == 0


def test_waiting_faults_steal_pressure_frequency_and_numa(kernel):
    cpus = "".join(f"cpu{number} 1 2 3\n" for number in range(4))

    def write(waited_s: float, faults: int, steal: int, stalled_us: int, cpu: int) -> None:
        kernel.thread(waited_s=waited_s, cpu=cpu)
        kernel.write("proc/self/stat", _stat(faults=faults))
        kernel.write("proc/stat", f"cpu  9 9 9 9 9 9 9 {steal} 0 0\n{cpus}intr 7\n")
        kernel.write("proc/pressure/io", f"some avg10=0.00 total={stalled_us}\n")

    kernel.write("sys/devices/system/node/node0/cpulist", "0-1,4\n")
    kernel.write("sys/devices/system/node/node1/cpulist", "2,3,5-7\n")
    for cpu, khz in ((1, 3_000_000), (6, 1_500_000)):
        kernel.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{khz}\n")
    write(1.0, 100, 1_000, 0, cpu=1)
    started(kernel)
    write(1.8, 140, 1_080, 1_000_000, cpu=6)
    assert kernel.after(2.0) == SensorSample(
        seconds=2.0,
        cpu_waiting=0.4,
        major_faults=20.0,
        cpu_steal=0.1,
        io_pressure=0.5,
        cpu_mhz=2000.0,
        numa_away=0.6667,
    )


def test_a_share_is_at_most_1_also_where_the_thread_waits_between_clock_and_reading(kernel):
    kernel.thread(waited_s=0.0)
    started(kernel)
    kernel.thread(waited_s=2.3)
    assert kernel.after(2.0).cpu_waiting == 1.0
    kernel.thread(waited_s=3.3)
    assert kernel.after(2.0).cpu_waiting == 0.5


def test_names_of_any_bytes_and_a_node_without_cpus_silence_no_sensor(kernel):
    kernel.thread(waited_s=1.0)
    file = kernel.proc / f"self/task/{THREAD}/stat"
    stat = file.read_bytes().replace(b"a name", b"caf\xe9")
    for path in (file, kernel.proc / "self" / "stat"):
        path.write_bytes(stat)
    mount = f"31 23 0:28 / {kernel.root}/cg rw - cgroup2 cgroup rw\n".encode()
    (kernel.proc / "self/mountinfo").write_bytes(
        b"1 2 0:1 / /mnt/caf\xe9 rw - ext4 /dev/sda rw\n" + mount
    )
    kernel.write("proc/self/cgroup", "0::/\n")
    kernel.throttled_v2("cg", times=0, seconds=0.0, limit="50000")
    kernel.write("sys/devices/system/node/node0/cpulist", "0\n")
    kernel.write("sys/devices/system/node/node1/cpulist", "1\n")
    (kernel.sys / "devices/system/node/node2").mkdir()
    sample = started(kernel).after(1.0)
    assert (sample.cpu_quota, sample.major_faults, sample.numa_away) == (0.5, 0.0, 0.0)
    assert kernel.recording.failures.count == 0


def test_a_thread_that_has_ended_and_a_counter_that_starts_again_are_no_failure(kernel):
    kernel.thread(waited_s=5.0)
    assert started(kernel).after(1.0).cpu_waiting == 0.0
    kernel.thread(waited_s=1.0)
    assert kernel.after(1.0).cpu_waiting == 0.0
    kernel.thread(waited_s=1.5)
    assert kernel.after(1.0).cpu_waiting == 0.5
    (kernel.proc / f"self/task/{THREAD}/schedstat").unlink()
    assert kernel.after(1.0) is None  # nothing was measured
    assert kernel.recording.failures.count == 0


def test_a_sensor_that_fails_is_counted_logged_once_and_left_out(kernel, caplog):
    kernel.thread()
    kernel.write("proc/pressure/io", "some avg10=0.00 total=5\n")
    assert started(kernel).after(1.0) == SensorSample(seconds=1.0, cpu_waiting=0.0, io_pressure=0.0)
    kernel.write("proc/pressure/io", "some nonsense\n")
    for _ in range(3):
        assert kernel.after(1.0) == SensorSample(seconds=1.0, cpu_waiting=0.0)
    assert kernel.recording.failures.count == 1
    assert caplog.text.count("the sensor io_pressure failed") == 1


def test_a_sensor_that_fails_at_first_leaves_the_others(kernel, caplog):
    kernel.thread()
    kernel.write("proc/pressure/io", "nonsense")
    assert started(kernel).after(1.0) == SensorSample(seconds=1.0, cpu_waiting=0.0)
    assert kernel.recording.failures.count == 1


def test_what_is_not_sent_is_in_the_next_sample(kernel):
    kernel.thread(waited_s=0.0)
    started(kernel)
    kernel.now_s = 2.0
    kernel.thread(waited_s=1.0)
    assert kernel.sampler.sample().cpu_waiting == 0.5
    kernel.now_s = 4.0
    assert kernel.sampler.sample().cpu_waiting == 0.25
    kernel.sampler.keep()
    kernel.now_s = 4.2
    assert kernel.sampler.sample() is None  # too short to tell
    kernel.now_s = 6.0
    kernel.thread(waited_s=2.0)
    assert kernel.sampler.sample().cpu_waiting == 0.5


def test_the_share_of_the_time_in_passes_is_told_without_that_of_transfers(kernel):
    started(kernel)
    ops = np.array([Op.FORWARD, Op.BACKWARD, Op.OPTIMIZER, Op.P2P, Op.DATA])
    batch = TelemetryBatch(
        rank=np.zeros(5, int),
        step=np.zeros(5, int),
        microbatch=np.zeros(5, int),
        op=ops,
        compute_ms=np.array([100.0, 200.0, 50.0, 900.0, 900.0]),
    )
    kernel.sampler.count(batch)
    kernel.after(1.0)
    kernel.sampler.count(batch)
    assert kernel.after(1.0) == SensorSample(seconds=1.0, busy=0.35)


# Devices


class NvmlError(Exception):
    pass


class NvmlTimeoutError(NvmlError):
    pass


class Nvml:
    """Behaves like `pynvml` with one device, which may be hot; `lacks` it does not support."""

    NVMLError, NVMLError_Timeout = NvmlError, NvmlTimeoutError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC = 1, 2, 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = 2, 3

    def __init__(self, *lacks: str) -> None:
        self.lacks, self.hot, self.ecc, self.link, self.xids = lacks, False, 3, 0, [31.0]

    def nvmlInit(self) -> None:
        if "driver" in self.lacks:
            raise NvmlError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1-2"
        return "gpu"

    def nvmlEventSetCreate(self) -> str:
        if "events" in self.lacks:
            raise NvmlError
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None:
        assert (handle, kind, events) == ("gpu", 8, "events")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0
        if not self.xids:
            raise NvmlTimeoutError
        return SimpleNamespace(eventData=self.xids.pop(0))

    def __getattr__(self, name: str):
        if name == "nvmlEventTypeXidCriticalError":
            return 8
        readings = {
            "ClockInfo": lambda kind: {1: 1200 if self.hot else 1700, 2: 2600}[kind],
            "CurrentClocksThrottleReasons": lambda: 0x21 if self.hot else 0x1,
            "Temperature": lambda kind: 91 if self.hot else 66,
            "PowerUsage": lambda: 350_500,
            "CurrPcieLinkGeneration": lambda: 5,
            "CurrPcieLinkWidth": lambda: 16,
            "TotalEccErrors": lambda error, counter: self.ecc if error == 0 else 0,
            "PcieReplayCounter": lambda: 0,
            "NvLinkState": self._state,
            "NvLinkErrorCounter": lambda link, kind: self.link if (link, kind) == (1, 2) else 0,
        }
        what = name.removeprefix("nvmlDeviceGet")
        if what not in readings:
            raise AttributeError(name)

        def ask(handle: str, *arguments: int) -> int:
            assert handle == "gpu"
            if what in self.lacks:
                raise NvmlError
            return readings[what](*arguments)

        return ask

    def _state(self, link: int) -> int:
        if link > 2:
            raise NvmlError
        return int(link < 2)


def clock() -> CudaClock:
    properties = SimpleNamespace(uuid="1-2")
    return CudaClock(
        SimpleNamespace(current_device=lambda: 5, get_device_properties=lambda device: properties)
    )


def sampled(kernel: Kernel, nvml: Nvml) -> Sampler:
    found = device_sensors(clock(), nvml)
    return Sampler(kernel.recording, find=lambda thread: found, now_s=lambda: kernel.now_s)


def test_a_device_is_read_through_nvml(kernel):
    nvml = Nvml()
    kernel.sampler = sampled(kernel, nvml)
    first = started(kernel).after(2.0)
    assert first.readings() == {
        "sm_mhz": 1700.0,
        "memory_mhz": 2600.0,
        "thermal_slowdown": 0.0,
        "power_slowdown": 0.0,
        "temperature_c": 66.0,
        "power_w": 350.5,
        "pcie_gen": 5.0,
        "pcie_width": 16.0,
        "ecc_corrected": 0.0,
        "ecc_uncorrected": 0.0,
        "pcie_replays": 0.0,
        "nvlink_errors": 0.0,
        "xid": 31.0,
    }
    nvml.hot, nvml.ecc, nvml.link, nvml.xids = True, 7, 9, [48.0, 63.0]
    hot = kernel.after(2.0)
    assert (hot.sm_mhz, hot.thermal_slowdown, hot.power_slowdown) == (1200.0, 1.0, 0.0)
    assert (hot.ecc_corrected, hot.nvlink_errors, hot.xid) == (2.0, 4.5, 63.0)
    assert kernel.after(2.0).xid == 0.0
    assert kernel.recording.failures.count == 0


def test_what_a_device_does_not_offer_is_left_out(kernel):
    kernel.sampler = sampled(kernel, Nvml("TotalEccErrors", "NvLinkState", "events", "PowerUsage"))
    kept = set(started(kernel).after(1.0).readings())
    assert kept == {
        *("sm_mhz", "memory_mhz", "thermal_slowdown", "power_slowdown", "temperature_c"),
        *("pcie_gen", "pcie_width", "pcie_replays"),
    }
    assert kernel.recording.failures.count == 0


def test_without_a_driver_or_a_known_device_there_are_no_sensors():
    assert device_sensors(clock(), Nvml("driver")) == []
    assert device_sensors(CudaClock(SimpleNamespace(current_device=lambda: 0)), Nvml()) == []


def test_every_sensor_is_a_field_of_a_sample(kernel):
    kernel.thread()
    host, device = kernel.sensors(THREAD), device_sensors(clock(), Nvml())
    names = [sensor.name for sensor in (*host, *device)]
    assert sorted([*names, "busy"]) == sorted(SENSOR_NAMES)
    assert {sensor.quantity for sensor in (*host, *device)} == set(Quantity)


# Heartbeats


def test_heartbeats_carry_samples_once_they_have_arrived(sidecar, monkeypatch, kernel):
    monkeypatch.setattr("resihp.hooks._heartbeat.monotonic", lambda: kernel.now_s)
    kernel.thread(waited_s=0.0)
    recording = kernel.recording
    sender = HeartbeatSender(
        sidecar, "j", 0, recording, recording.failures, interval_s=1.0, sampler=kernel.sampler
    )
    for second in range(8):
        kernel.now_s = float(second)
        kernel.thread(waited_s=0.25 * second)
        sender.beat_if_due()
    waited = [beat.sensors and beat.sensors.cpu_waiting for beat in sidecar.heartbeats]
    assert waited == [None, 0.25, None, None, None, None, 0.25, None]
    sender.leave("")
    assert sidecar.heartbeats[-1].sensors is None


def test_a_monitor_reads_the_sensors_of_its_training_thread(make_monitor, sidecar, wait_until):
    monitor = make_monitor(heartbeat_s=0.6, clock=None)
    with monitor.step(), monitor.forward():
        wait_until(lambda: any(beat.sensors for beat in sidecar.heartbeats))
    assert monitor._recording.thread_id == threading.get_native_id()
    assert monitor.stats.failures == 0


@pytest.mark.parametrize("by", ["option", "environment"])
def test_sensors_may_be_forbidden(make_monitor, sidecar, wait_until, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("RESIHP_SENSORS", "0")
    monitor = make_monitor(heartbeat_s=0.3, **({"sensors": False} if by == "option" else {}))
    with monitor.step(), monitor.forward():
        wait_until(lambda: len(sidecar.heartbeats) > 4)
    assert not any(beat.sensors for beat in sidecar.heartbeats)
