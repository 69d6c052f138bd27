"""HTTP servers with given answers, which may break the protocol of AppWorld's servers."""

import contextlib
import http.server
import json
import threading
import time


class BrokenServer:
    """An HTTP server whose `script` maps a path to (status, body, announced length) or to a function that answers."""

    def __init__(self, script):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = script.get(self.path, script.get("*"))
                if callable(answer):
                    return answer(self)
                status, body, *length = answer
                self.send_response(status)
                self.send_header("Content-Length", str(length[0] if length else len(body)))
                self.end_headers()
                self.wfile.write(body)
                return None

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.server.shutdown()
        self.server.server_close()


def answer(output):
    return 200, json.dumps({"output": output}).encode()


PROPER = {
    "/": (200, b'{"message": "Welcome to AppWorld Server!"}'),
    "/initialize": answer({"task_id": "t_1"}),
    "/execute": answer("Execution successful."),
    "/task_completed": answer(False),
    "/evaluate": answer({"passes": [{"requirement": "a"}], "failures": [], "num_tests": 2}),
    "/close": answer(None),
}


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def hang_up(handler):
    handler.close_connection = True


def speak_no_http(handler):
    handler.wfile.write(b"220 smtp ready\r\n")


def raw(beginning, piece, times=100, pause_s=0.05):
    """An answer of bytes that need not be HTTP: a beginning, then a piece again and again until the client leaves."""

    def write(handler):
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(beginning)
            for _ in range(times):
                handler.wfile.write(piece)
                time.sleep(pause_s)

    return write
