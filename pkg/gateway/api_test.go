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
	var leases map[string]string
	if err != nil || status != 200 || json.Unmarshal([]byte(text), &leases) != nil || leases["192.168.5.15"] != guestMAC || leases["192.168.5.2"] != "5a:94:ef:e4:0c:dd" {
		t.Errorf("leases: %d %s %v", status, text, err)
	}

	for _, zone := range []string{
		`{"Name":"internal.","Records":[{"Name":"host.lima","IP":"192.168.5.2","Regexp":null},{"Name":"lima-box","IP":"192.168.5.15"},{"Name":"elsewhere","IP":"10.0.0.1"}],"DefaultIP":""}`,
		`{"Name":"host.docker.internal.","Records":null,"DefaultIP":"192.168.5.2"}`,
	} {
		if status, text := post("/services/dns/add", zone); status != 200 {
			t.Errorf("dns/add: %d %s", status, text)
		}
	}
	for name, want := range map[string]string{
		"host.lima.internal": "192.168.5.2", "lima-box.internal": "192.168.5.15", "host.docker.internal": "192.168.5.2",
		"elsewhere.internal": "invalid IP",
	} {
		if addr, err := w.guest.Lookup(w.ctx(), name); addr.String() != want {
			t.Errorf("%s: %s, %v", name, addr, err)
		}
	}
	for _, bad := range []string{"", "{", `{"Name":"..","DefaultIP":"192.168.5.2"}`, `[]`} {
		if status, _ := post("/services/dns/add", bad); status == 200 {
			t.Errorf("dns/add took %q", bad)
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
			t.Fatalf("expose: %d %s", status, text)
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
		t.Errorf("%q, %v", b, err)
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
			t.Errorf("expose took %s", bad)
		}
	}
	if status, text := post("/services/forwarder/unexpose", fmt.Sprintf(`{"local":"127.0.0.1:%d","protocol":"tcp"}`, port)); status != 200 {
		t.Errorf("unexpose: %d %s", status, text)
	}
	if status, _ := post("/services/forwarder/unexpose", `{"local":"127.0.0.1:1","protocol":"tcp"}`); status == 200 {
		t.Error("unexpose of what is not exposed")
	}
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
		c.Close()
		t.Error("still exposed")
	}
}

// TestAPIIsNotInside checks that the guest cannot reach the API.
func TestAPIIsNotInside(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	for _, port := range []uint16{80, 443, 8080, 1024} {
		if c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(w.g.host, port)); err == nil {
			c.Close()
			t.Errorf("port %d is open", port)
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
