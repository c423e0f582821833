//go:build e2e

package e2e

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// These are addresses of the pretend internet and LAN, behind a cable.
const (
	resolverAddr = "203.0.113.53"
	allowedAddr  = "203.0.113.10" // github.com
	foreignAddr  = "203.0.113.66" // evil.example
	forgeAddr    = "203.0.113.40" // what useForgeAddr names
	sixAddr      = "2001:db8::10" // six.example
	lanAddr      = "10.9.9.9"
	metadataAddr = "169.254.169.254"
)

// zone is what the pretend internet's resolver knows. zoneLock protects it.
var zone = map[string][]string{
	"github.com.":        {allowedAddr},
	"evil.example.":      {foreignAddr},
	"files.example.":     {"203.0.113.20"},
	"rebind.github.com.": {lanAddr, "127.0.0.1", metadataAddr},
	"rebind.example.":    {lanAddr, "203.0.113.20"},
	"pkg.npmjs.org.":     {"203.0.113.30"},
	"asked.example.":     {"203.0.113.20"},
	"refused.example.":   {"203.0.113.20"},
	"1.asked.example.":   {"203.0.113.20"},
	"2.asked.example.":   {"203.0.113.20"},
	"3.asked.example.":   {"203.0.113.20"},
	"4.asked.example.":   {"203.0.113.20"},
	"5.asked.example.":   {"203.0.113.20"},
	"alias.example.":     nil, // a CNAME to evil.example
	"six.example.":       {sixAddr},
}

var zoneLock sync.Mutex

// forgeLock is held by the test that uses forgeAddr.
var forgeLock sync.Mutex

// useForgeAddr makes the resolver answer names with forgeAddr until the end of the test. It waits until
// no other test uses that address.
func useForgeAddr(t *testing.T, names ...string) {
	t.Helper()
	forgeLock.Lock()
	t.Cleanup(forgeLock.Unlock)
	zoneLock.Lock()
	defer zoneLock.Unlock()
	before := maps.Clone(zone)
	for _, name := range names {
		zone[name+"."] = []string{forgeAddr}
	}
	t.Cleanup(func() {
		zoneLock.Lock()
		defer zoneLock.Unlock()
		zone = before
	})
}

// far is the namespace of the pretend internet.
var far *realvm.Namespace

// hits counts what reached the pretend internet, by "ADDRESS:PORT" and "dns NAME".
var hits sync.Map

func hit(what string) {
	n, _ := hits.LoadOrStore(what, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

func hitCount(what string) int64 {
	n, ok := hits.Load(what)
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}

// pretendInternet sets up the namespace this process was started in, and another one
// behind a cable: the gateway does not treat the host's own addresses as part of the
// internet.
func pretendInternet() error {
	var err error
	if far, err = realvm.NewNamespace(); err != nil {
		return err
	}
	if err := realvm.IP(
		"link add name uplink type veth peer name downlink netns "+strconv.Itoa(far.TID),
		"addr add 198.51.100.2/24 dev uplink", "addr add 2001:db8:1::2/64 dev uplink nodad", "link set uplink up",
	); err != nil {
		return err
	}
	err = far.Do(func() error {
		lines := []string{
			"link set lo up", "addr add 198.51.100.1/24 dev downlink", "addr add 2001:db8:1::1/64 dev downlink nodad", "link set downlink up",
			"addr add " + sixAddr + "/128 dev lo nodad",
		}
		for _, a := range []string{resolverAddr, allowedAddr, forgeAddr, foreignAddr, "203.0.113.20", "203.0.113.30", lanAddr, metadataAddr} {
			lines = append(lines, "addr add "+a+"/32 dev lo")
		}
		return realvm.IP(lines...)
	})
	if err == nil {
		err = realvm.IP("route add default via 198.51.100.1", "-6 route add default via 2001:db8:1::1")
	}
	if err != nil {
		return err
	}
	// The guest's network takes its resolver from the host's resolv.conf.
	if err := syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	f, err := os.CreateTemp("", "asz-resolv")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // the mount keeps the inode
	fmt.Fprintln(f, "nameserver "+resolverAddr)
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	f.Close()
	if err := syscall.Mount(f.Name(), "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("replace resolv.conf: %w", err)
	}
	for _, network := range []string{"udp", "tcp"} {
		s := &dns.Server{Addr: resolverAddr + ":53", Net: network, Handler: dns.HandlerFunc(resolve)}
		err := far.Do(func() (err error) {
			if network == "udp" {
				s.PacketConn, err = net.ListenPacket(network, s.Addr)
			} else {
				s.Listener, err = net.Listen(network, s.Addr)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("resolver: %w", err)
		}
		go s.ActivateAndServe()
	}
	for _, addr := range []string{
		allowedAddr + ":80", allowedAddr + ":22", allowedAddr + ":25", allowedAddr + ":8080", allowedAddr + ":853",
		foreignAddr + ":80", "203.0.113.20:80", lanAddr + ":80", metadataAddr + ":80", "127.0.0.1:80", "127.0.0.1:8088",
	} {
		var ln net.Listener
		listen := func() (err error) {
			ln, err = net.Listen("tcp", addr)
			return err
		}
		if strings.HasPrefix(addr, "127.") {
			err = listen() // one of the host's own services
		} else {
			err = far.Do(listen)
		}
		if err != nil {
			return err
		}
		go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // a test server
			hit(addr)
			_, _ = io.WriteString(w, "this is "+addr+"\n")
		}))
	}
	return nil
}

func resolve(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	name := strings.ToLower(q.Question[0].Name)
	hit("dns " + name)
	zoneLock.Lock()
	addrs, ok := zone[name]
	zoneLock.Unlock()
	switch {
	case !ok:
		m.Rcode = dns.RcodeNameError
	case name == "alias.example.":
		m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 60}, Target: "evil.example."})
		addrs = []string{foreignAddr}
	}
	for _, a := range addrs {
		hdr := dns.RR_Header{Name: q.Question[0].Name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET, Ttl: 60}
		switch six := strings.Contains(a, ":"); {
		case hdr.Rrtype == dns.TypeA && !six:
			m.Answer = append(m.Answer, &dns.A{Hdr: hdr, A: net.ParseIP(a)})
		case hdr.Rrtype == dns.TypeAAAA && six:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: hdr, AAAA: net.ParseIP(a)})
		}
	}
	_ = w.WriteMsg(m)
}
