import random
import socket
from pathlib import Path

from cluster.config import HttpConfig, MetricsConfig
from cluster.environment import (
    PORTS,
    Ports,
    connect_problem,
    free_port,
    free_ports,
    port_problem,
    serve_environment,
)

PRIVATE = Ports(stats=1, metrics=2, fallback_http=3, fallback_grpc=4, first_ingress=5)


def test_limits_come_from_the_configuration() -> None:
    http = HttpConfig(max_connections=17, num_threads=3, max_stream_s=90)
    environment = serve_environment(http, MetricsConfig(), Path("/f"), PRIVATE)
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == "17"
    assert environment["RAY_SERVE_HAPROXY_NBTHREAD"] == "3"
    assert environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "90"


def test_all_files_lie_in_the_folder() -> None:
    environment = serve_environment(HttpConfig(), MetricsConfig(), Path("/f"), PRIVATE)
    paths = [value for value in environment.values() if value.startswith("/")]
    assert len(paths) == 5
    assert all(path.startswith("/f/") for path in paths)


def test_haproxys_sockets_fit_into_its_limit() -> None:
    folder = Path("/123456/headway-12345678")  # MAX_TEMP_DIR_CHARS, and what mkdtemp appends
    environment = serve_environment(HttpConfig(), MetricsConfig(), folder, PRIVATE)
    socket_path = Path(environment["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"])
    node_id = "f" * 56  # Serve puts a folder of this name between
    assert len(str(socket_path.parent / node_id / socket_path.name)) <= 97


def test_the_routers_ports_are_neither_the_kernels_nor_privileged() -> None:
    ports = free_ports(random.Random(0))
    environment = serve_environment(HttpConfig(), MetricsConfig(), Path("/f"), ports)
    assert int(environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"]) >= PORTS.start
    assert int(environment["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"]) <= PORTS.stop


def test_no_port_of_serve_is_left_to_a_default_that_clusters_of_one_host_would_share() -> None:
    environment = serve_environment(HttpConfig(), MetricsConfig(), Path("/f"), PRIVATE)
    ports = {name: value for name, value in environment.items() if name.endswith("_PORT")}
    assert {value for name, value in ports.items() if "MAX" not in name} == {"1", "2", "3", "4", "5"}


def test_a_free_port_is_free_and_not_one_that_the_kernel_gives_away() -> None:
    port = free_port(random.Random())
    assert port in PORTS
    assert port_problem("127.0.0.1", port) is None


def test_a_taken_port_is_named_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_problem("127.0.0.1", port) == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_an_address_of_another_machine_is_refused() -> None:
    assert (
        port_problem("192.0.2.200", 8000)
        == "cannot listen on 192.0.2.200:8000: Cannot assign requested address"
    )


def test_an_address_where_nobody_answers_is_told_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert connect_problem(address) == "Connection refused"
        taken.listen()
        assert connect_problem(address) is None


def test_other_forms_of_address_are_not_tried() -> None:
    assert connect_problem("auto") is None
    assert connect_problem("ray://host:10001") is None
