package gateway

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestLimaAPI makes the requests that Lima's hostagent sends to the endpoint socket before
// the VM runs.
func TestLimaAPI(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	api := httptest.NewServer(w.g.API())
	defer api.Close()
	post := func(path, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(w.ctx(), http.MethodPost, api.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		status, text, err := do(http.DefaultClient, r)
		if err != nil {
			t.Fatal(err)
		}
		return status, text
	}
	status, text, err := w.get(http.DefaultClient, api.URL+"/services/dhcp/leases")
	if err != nil || status != 200 {
		t.Errorf("GET leases = %d %q, %v, want status 200", status, text, err)
	}
	var leases map[string]string
	if err := json.Unmarshal([]byte(text), &leases); err != nil {
		t.Errorf("GET leases = %q: %v", text, err)
	}
	for addr, mac := range map[string]string{"192.168.5.15": guestMAC, "192.168.5.2": "5a:94:ef:e4:0c:dd"} {
		if leases[addr] != mac {
			t.Errorf("lease of %s = %q, want %q", addr, leases[addr], mac)
		}
	}

	for _, zone := range []string{
		`{"Name":"internal.","Records":[{"Name":"host.lima","IP":"192.168.5.2","Regexp":null},{"Name":"lima-box","IP":"192.168.5.15"},{"Name":"elsewhere","IP":"10.0.0.1"}],"DefaultIP":""}`,
		`{"Name":"host.docker.internal.","Records":null,"DefaultIP":"192.168.5.2"}`,
	} {
		if status, text := post("/services/dns/add", zone); status != 200 {
			t.Errorf("POST dns/add %s = %d %q, want status 200", zone, status, text)
		}
	}
	for name, want := range map[string]string{
		"host.lima.internal": "192.168.5.2", "lima-box.internal": "192.168.5.15", "host.docker.internal": "192.168.5.2",
		"elsewhere.internal": "invalid IP",
	} {
		if addr, err := w.guest.Lookup(w.ctx(), name); addr.String() != want {
			t.Errorf("Lookup(%q) = %s, %v, want %s", name, addr, err, want)
		}
	}
	for _, bad := range []string{"", "{", `{"Name":"..","DefaultIP":"192.168.5.2"}`, `[]`} {
		if status, _ := post("/services/dns/add", bad); status == 200 {
			t.Errorf("POST dns/add %q = %d, want an error status", bad, status)
		}
	}

	l, err := w.guest.Listen(22)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { echo(c); c.Close() }()
		}
	}()
	port := freePort(t)
	expose := fmt.Sprintf(`{"local":"127.0.0.1:%d","remote":"192.168.5.15:22","protocol":"tcp"}`, port)
	for range 2 { // a restarted hostagent asks again
		if status, text := post("/services/forwarder/expose", expose); status != 200 {
			t.Fatalf("POST expose %s = %d %q, want status 200", expose, status, text)
		}
	}
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	io.WriteString(c, "into the guest")
	c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "into the guest" {
		t.Errorf("echo through the exposed port = %q, %v, want %q", b, err, "into the guest")
	}
	for _, bad := range []string{
		`{"local":"0.0.0.0:2222","remote":"192.168.5.15:22","protocol":"tcp"}`,
		`{"local":":2222","remote":"192.168.5.15:22","protocol":"tcp"}`,
		`{"local":"127.0.0.1:2222","remote":"192.168.5.2:22","protocol":"tcp"}`,
		`{"local":"127.0.0.1:2222","remote":"10.0.0.1:22","protocol":"tcp"}`,
		`{"local":"127.0.0.1:2222","remote":"192.168.5.15:0","protocol":"tcp"}`,
		`{"local":"127.0.0.1:2222","remote":"192.168.5.15:22","protocol":"udp"}`,
		`{"local":"/tmp/socket","remote":"192.168.5.15:22","protocol":"unix"}`,
		fmt.Sprintf(`{"local":"127.0.0.1:%d","remote":"192.168.5.15:23","protocol":"tcp"}`, port),
		`nonsense`,
	} {
		if status, _ := post("/services/forwarder/expose", bad); status == 200 {
			t.Errorf("POST expose %s = %d, want an error status", bad, status)
		}
	}
	if status, text := post("/services/forwarder/unexpose", fmt.Sprintf(`{"local":"127.0.0.1:%d","protocol":"tcp"}`, port)); status != 200 {
		t.Errorf("POST unexpose of port %d = %d %q, want status 200", port, status, text)
	}
	if status, _ := post("/services/forwarder/unexpose", `{"local":"127.0.0.1:1","protocol":"tcp"}`); status == 200 {
		t.Errorf("POST unexpose of a port that is not exposed = %d, want an error status", status)
	}
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
		c.Close()
		t.Errorf("Dial of port %d after unexpose succeeded, want an error", port)
	}
}

// TestAPIIsNotInside checks that the guest cannot reach the API.
func TestAPIIsNotInside(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	for _, port := range []uint16{80, 443, 8080, 1024} {
		if c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(w.g.host, port)); err == nil {
			c.Close()
			t.Errorf("Dial of the gateway's port %d by the guest succeeded, want an error", port)
		}
	}
}

func freePort(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
