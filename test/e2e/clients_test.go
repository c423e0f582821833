//go:build e2e

package e2e

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// TestClients covers what people use a network for, through the egress gateway: real
// programs in one real guest. The host is behind a company's proxy, except for the
// names of the forge.
func TestClients(t *testing.T) {
	useForgeAddr(t, "github.com", "api.github.com", "bound.example")
	b := newBox(t)
	token := "ghp_" + random()
	forge := newForge(t, filepath.Join(b.Home, "forge"), token, "github.com", "api.github.com", "bound.example", "six.example", "proxied.example")
	proxy := newProxy(t)
	proxy.leads("proxied.example", forgeAddr) // a name that only the proxy resolves
	proxy.leads("evil.example", foreignAddr)

	b.Write("ca.pem", string(forge.ca))
	b.Env = append(b.Env,
		"SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"), // the gateway verifies the forge, whose secrets it has
		"HTTP_PROXY="+proxy.url, "HTTPS_PROXY="+proxy.url, "http_proxy=", "https_proxy=",
		"NO_PROXY=github.com,bound.example,six.example", "no_proxy=",
	)
	b.Write(".config/agent-sessionizer/config.yaml", `
secrets:
  GITHUB_TOKEN: "cmd:printf `+token+`"
  OTHER: {from: "cmd:printf `+otherToken+`", to: [bound.example]}
`)
	project := b.Repo("project")
	if r := b.RunIn(project, "git", "remote", "add", "origin", "https://github.com/"+repository); r.Code != 0 {
		t.Fatal(r.All())
	}
	b.Asz("trust", "./project")
	name := b.open("./project")
	b.Asz("net", "allow", name, "github.com:22,80,443,7000", "bound.example", "six.example", "proxied.example")

	// What the guest needs: the clients, the forge's CA, and the CA that this host
	// trusts for the real registries.
	trusted := "/etc/ssl/certs/ca-certificates.crt"
	if own := os.Getenv("SSL_CERT_FILE"); own != "" {
		trusted = own
	}
	bundle, err := os.ReadFile(trusted)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(b.Home, "clients"), os.DirFS("testdata")); err != nil {
		t.Fatal(err)
	}
	b.Write("clients/host.crt", string(bundle))
	b.Write("clients/pretend.crt", string(forge.ca))
	b.Asz("cp", "clients", name+":/tmp/clients")
	b.MustIn(name, "sudo install -m 644 /tmp/clients/pretend.crt /usr/local/share/ca-certificates/ && sudo update-ca-certificates")

	t.Run("git over HTTPS", func(t *testing.T) {
		gitClient(t, b, forge, name, "https", "https://github.com/"+repository)
	})
	t.Run("git over SSH", func(t *testing.T) { cloneOverSSH(t, b, forge, name) })
	t.Run("HTTP/2", func(t *testing.T) { requestOverHTTP2(t, b, name) })
	t.Run("keep-alive", func(t *testing.T) { reuseConnection(t, b, name) })
	t.Run("WebSocket", func(t *testing.T) { exchangeMessages(t, b, name) })
	t.Run("event stream", func(t *testing.T) { readEventStream(t, b, name) })
	t.Run("chunked upload", func(t *testing.T) { uploadChunked(t, b, name) })
	t.Run("half-close", func(t *testing.T) { closeHalf(t, b, name) })
	t.Run("a long download", func(t *testing.T) { downloadLong(t, b, forge, name) })
	t.Run("IPv6 upstream", func(t *testing.T) { reachIPv6(t, b, name) })
	t.Run("the host's proxy", func(t *testing.T) { useHostProxy(t, b, name) })

	// The real registries.
	t.Run("apt", func(t *testing.T) {
		long(t)
		installWithApt(t, b, proxy, name)
	})
	t.Run("npm", func(t *testing.T) { installWithNPM(t, b, proxy, name) })
	t.Run("docker", func(t *testing.T) { runDocker(t, b, name) })
	t.Run("a secret", func(t *testing.T) { sendSecret(t, b, forge, name) })
	t.Run("GitHub's rules", func(t *testing.T) { useGitHub(t, b, forge, name) })
}

// cloneOverSSH adds the guest's key to the forge, then clones, commits and pushes.
func cloneOverSSH(t *testing.T, b *box, f *forge, session string) {
	key := b.MustIn(session, "ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519 && cat ~/.ssh/id_ed25519.pub")
	public, _, _, _, err := ssh.ParseAuthorizedKey([]byte(key))
	if err != nil {
		t.Fatalf("public key of the guest = %q, %v, want a key", key, err)
	}
	wire := public.Marshal()
	f.login.Store(&wire)
	host := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(f.hostKey.PublicKey())))
	b.MustIn(session, "echo 'github.com "+host+"' >>~/.ssh/known_hosts")
	gitClient(t, b, f, session, "ssh", "git@github.com:"+repository)
}

// requestOverHTTP2 requests twice over one HTTP/2 connection.
func requestOverHTTP2(t *testing.T, b *box, session string) {
	got := b.MustIn(session, "curl -sS --http2 -m 120 -w '%{http_version} ' https://github.com/hello https://github.com/hello")
	hello := regexp.QuoteMeta("github.com at " + forgeAddr + ":443 over HTTP/2.0 from ")
	if m := regexp.MustCompile("^" + hello + "(.*)\n2 " + hello + "(.*)\n2$").FindStringSubmatch(got); m == nil || m[1] != m[2] {
		t.Errorf("two requests over one HTTP/2 connection = %q, want two answers over it", got)
	}
}

// bases are a server in the clear, through the gateway, which reads the requests because a secret is
// bound to the name, and end to end.
var bases = []string{"http://bound.example", "https://bound.example", "https://six.example"}

// reuseConnection requests three times over one HTTP/1.1 connection.
func reuseConnection(t *testing.T, b *box, session string) {
	for _, base := range bases {
		got := b.MustIn(session, strings.ReplaceAll("curl -sS --http1.1 -m 120 -w '%{num_connects}\\n' URL URL URL", "URL", base+"/hello"))
		from := regexp.MustCompile(regexp.QuoteMeta("HTTP/1.1")+` from (\S+)\n([01])`).FindAllStringSubmatch(got, -1)
		if len(from) != 3 || from[0][1] != from[2][1] || from[0][2]+from[1][2]+from[2][2] != "100" {
			t.Errorf("%s: three requests on one connection = %q, want one source, connects 1, 0, 0", base, got)
		}
	}
}

// exchangeMessages exchanges messages over a WebSocket, with and without TLS.
func exchangeMessages(t *testing.T, b *box, session string) {
	for _, base := range []string{"ws://bound.example", "wss://bound.example", "wss://six.example"} {
		if got := node(b, session, "websocket.mjs", base+"/socket"); got != "4 answers" {
			t.Errorf("%s: websocket.mjs = %q, want \"4 answers\"", base, got)
		}
	}
}

// readEventStream reads server-sent events, with and without TLS.
func readEventStream(t *testing.T, b *box, session string) {
	for _, base := range bases {
		if got := node(b, session, "events.mjs", base, random()); got != "0 1 2 3 4 5 end" {
			t.Errorf("%s: events.mjs = %q, want \"0 1 2 3 4 5 end\"", base, got)
		}
	}
}

// uploadChunked sends a body of unknown length.
func uploadChunked(t *testing.T, b *box, session string) {
	for _, base := range bases {
		got := b.MustIn(session, "seq 200000 >/tmp/numbers; curl -sS --http1.1 -m 120 -T - "+base+"/upload </tmp/numbers; wc -c </tmp/numbers; sha256sum </tmp/numbers")
		f := strings.Fields(got)
		if len(f) != 8 || f[0] != "HTTP/1.1" || f[2] != "[chunked]" || f[3] != "<nil>" || f[1] != f[5] || f[4] != f[6] {
			t.Errorf("%s: chunked upload = %q, want HTTP/1.1, [chunked], the size and digest that were sent", base, got)
		}
	}
}

// closeHalf ends one direction of a connection before the other.
func closeHalf(t *testing.T, b *box, session string) {
	b.MustIn(session, "yes 'many lines' | head -n 50000 >/tmp/lines")
	want := b.MustIn(session, "printf 'half a line' | sha256sum; sha256sum </tmp/lines")
	sums := strings.Fields(want)
	if got := node(b, session, "halfclose.mjs", "github.com", "7000"); got != fmt.Sprintf("11 <nil> %s\n550000 <nil> %s", sums[0], sums[2]) {
		t.Errorf("halfclose.mjs = %q, want 11 and 550000 bytes with the digests of %q", got, want)
	}
}

// downloadLong compares the digests of a large download.
func downloadLong(t *testing.T, b *box, f *forge, session string) {
	got := b.MustIn(session, "curl -sS -m 900 http://github.com/big | md5sum")
	select {
	case sum := <-f.sent:
		if !strings.HasPrefix(got, sum+" ") {
			t.Errorf("digest of the download in the guest = %q, want %s", got, sum)
		}
	case <-time.After(patience):
		t.Errorf("download after %v is not sent to its end, the guest has %q, want all of it", patience, got)
	}
}

// reachIPv6 requests a name that the gateway reaches over IPv6.
func reachIPv6(t *testing.T, b *box, session string) {
	got := b.MustIn(session, "curl -sS -m 120 http://six.example/hello https://six.example/hello")
	for _, want := range []string{":80 over HTTP/1.1", ":443 over HTTP/2.0"} {
		if !strings.Contains(got, "six.example at ["+sixAddr+"]"+want) {
			t.Errorf("requests to six.example = %q, want [%s]%s", got, sixAddr, want)
		}
	}
}

// useHostProxy checks which names the gateway reaches through the host's proxy.
func useHostProxy(t *testing.T, b *box, session string) {
	got := b.MustIn(session, "env | grep -i _proxy=; curl -sS -m 120 http://proxied.example/hello https://proxied.example/hello")
	for port, proto := range map[string]string{"80": "HTTP/1.1", "443": "HTTP/2.0"} {
		if !strings.Contains(got, "proxied.example at "+forgeAddr+":"+port+" over "+proto) || hitCount("proxy proxied.example:"+port) != 1 {
			t.Errorf("port %s through the proxy %d times = %s, want one request over %s", port, hitCount("proxy proxied.example:"+port), got, proto)
		}
	}
	if strings.Contains(strings.ToLower(got), "_proxy=") {
		t.Errorf("environment in the guest = %s, want no proxy variable", got)
	}
	if r := b.In(session, "curl -sS -m 60 http://evil.example/ || curl -sS -m 60 https://evil.example/"); r.Code == 0 {
		t.Errorf("curl of a denied name through the proxy = %s, want a failure", r.Stdout)
	}
	for what, want := range map[string]int64{"dns proxied.example.": 0, "proxy evil.example:80": 0, "proxy evil.example:443": 0, "proxy github.com:443": 0, "proxy six.example:80": 0} {
		if n := hitCount(what); n != want {
			t.Errorf("requests counted as %s = %d, want %d", what, n, want)
		}
	}
}

// installWithApt installs a package from the real archive.
func installWithApt(t *testing.T, b *box, proxy *proxy, session string) {
	sources := b.MustIn(session, "apt-get update --print-uris | cut -d\\' -f2")
	for _, uri := range strings.Fields(sources) {
		u, err := url.Parse(uri)
		if err != nil || u.Hostname() == "" {
			t.Fatalf("source of apt = %q, %v, want a URL", uri, err)
		}
		proxy.leadsOut(t, u.Hostname(), portOf(u))
	}
	// Packages without triggers: an initramfs takes an emulated guest minutes.
	packages := "bash-static gh"
	if !testing.Short() {
		packages += " python3-requests python3-httpx"
	}
	b.MustIn(session, `set -e; if command -v bash-static; then exit 1; fi
			get="sudo apt-get -qq -o Acquire::https::CaInfo=/tmp/clients/host.crt -o APT::Update::Error-Mode=any"
			$get update; $get install -y `+packages+`; bash-static -c true`)
}

// installWithNPM installs a package from the real registry.
func installWithNPM(t *testing.T, b *box, proxy *proxy, session string) {
	registry := npmRegistry(t)
	target := registry.Hostname() + ":" + portOf(registry)
	proxy.leadsOut(t, registry.Hostname(), portOf(registry))
	// The usual registry is on the shipped allowlist.
	if usual := b.MustIn(session, "npm config get registry"); usual != registry.String() {
		b.Asz("net", "allow", session, target)
	}
	got := b.MustIn(session, "mkdir -p /tmp/npm && cd /tmp/npm && NODE_EXTRA_CA_CERTS=/tmp/clients/host.crt npm install --no-audit --no-fund --cafile=/tmp/clients/host.crt --registry="+
		registry.String()+" is-number >&2 && node -p 'require(\"is-number\")(\"5\")'")
	if got != "true" || hitCount("proxy "+target) == 0 {
		t.Errorf("is-number in the guest = %q with %d connections of the proxy, want true, some", got, hitCount("proxy "+target))
	}
}

// runDocker builds an image and runs containers, which must be bound to the policy too.
func runDocker(t *testing.T, b *box, session string) {
	long(t)
	before := hitCount("dns evil.example.") + hitCount(foreignAddr+":80")
	got := b.MustIn(session, "sh /tmp/clients/docker.sh https://github.com/hello http://evil.example/ http://"+foreignAddr+"/")
	for _, where := range []string{"built", "host network"} {
		if !strings.Contains(got, where+": github.com at "+forgeAddr+":443 over ") {
			t.Errorf("%s: output = %s, want github.com at %s", where, got, forgeAddr)
		}
	}
	if after := hitCount("dns evil.example.") + hitCount(foreignAddr+":80"); after != before {
		t.Errorf("requests of a container for denied names = %d, want %d as before", after, before)
	}
}

// otherToken is the value of the secret OTHER, which is bound to bound.example.
const otherToken = "other-0123456789-abcdefghij"

// sendSecret sends the placeholder of a secret with the programs that people use.
func sendSecret(t *testing.T, b *box, f *forge, session string) {
	real := func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+otherToken }
	f.http.HandleFunc("/secret", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "real: %t", real(r)) })
	f.http.HandleFunc("/npm/", func(w http.ResponseWriter, r *http.Request) {
		if !real(r) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{"name":"private","dist-tags":{"latest":"1.2.3"},"versions":{"1.2.3":{"name":"private","version":"1.2.3","dist":{"tarball":"https://bound.example/npm/private.tgz"}}}}`)
	})
	program := filepath.Join(b.Home, "goclient")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./testdata/goclient")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build = %v\n%s", err, out)
	}
	b.Asz("cp", "goclient", session+":/tmp/goclient")
	const at = "https://bound.example/secret"
	python := func(library string) string {
		return `python3 -c 'import os, ` + library + `; print(` + library + `.get("` + at + `", headers={"Authorization": "Bearer " + os.environ["OTHER"]}, timeout=120).text)'`
	}
	for client, c := range map[string]struct{ command, want string }{
		"curl over HTTP/1.1": {`curl -sS -m 120 --http1.1 -H "Authorization: Bearer $OTHER" ` + at, "real: true"},
		"curl over HTTP/2":   {`curl -sS -m 120 --http2 -H "Authorization: Bearer $OTHER" ` + at, "real: true"},
		"fetch of Node":      {`node -e 'fetch("` + at + `", {headers: {Authorization: "Bearer " + process.env.OTHER}}).then(r => r.text()).then(console.log)'`, "real: true"},
		"Python's requests":  {python("requests"), "real: true"},
		"Python's httpx":     {python("httpx"), "real: true"},
		"Go over HTTP/2":     {"/tmp/goclient " + at, "real: true"},
		"Go over HTTP/1.1":   {"/tmp/goclient -1 " + at, "real: true"},
		"npm":                {`cd /tmp && npm view private version --registry=https://bound.example/npm/ "--//bound.example/npm/:_authToken=$OTHER"`, "1.2.3"},
		"another host":       {`curl -sSk -m 120 -H "Authorization: Bearer $OTHER" https://six.example/secret`, "real: false"},
	} {
		if testing.Short() && strings.HasPrefix(client, "Python") { // its libraries are not installed
			continue
		}
		if r := b.In(session, c.command); strings.TrimSpace(r.Stdout) != c.want {
			t.Errorf("%s = %s, want %q", client, r.All(), c.want)
		}
	}
}

// node runs a program of testdata in the guest.
func node(b *box, session, program string, args ...string) string {
	r := b.In(session, "NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt timeout 300 node /tmp/clients/"+program+" "+strings.Join(args, " "))
	return strings.TrimSpace(r.All())
}

// gitClient clones, commits and pushes.
func gitClient(t *testing.T, b *box, f *forge, session, branch, from string) {
	t.Helper()
	dir := filepath.Join(f.root, repository)
	if _, err := os.Stat(dir); err != nil {
		b.Repo("forged")
		if r := b.RunIn(filepath.Join(b.Home, "forged"), "sh", "-c", "head -c 4194304 /dev/urandom >blob && git add . && git commit -qm blob && git clone -q --bare . '"+dir+"' && git -C '"+dir+"' config http.receivepack true"); r.Code != 0 {
			t.Fatalf("forged.git: exit %d\n%s\nwant exit 0", r.Code, r.All())
		}
	}
	main := strings.TrimSpace(b.Run("git", "-C", dir, "rev-parse", "main").Stdout)
	got := b.MustIn(session, fmt.Sprintf(`set -e; export GIT_TERMINAL_PROMPT=0; git clone -q %[1]s /tmp/%[2]s; cd /tmp/%[2]s; git fsck --strict; git rev-parse HEAD
		echo %[2]s >pushed; git add pushed; git commit -qm %[2]s; git push -q origin HEAD:refs/heads/%[2]s; git rev-parse HEAD`, from, branch))
	commits := strings.Fields(got)
	pushed := b.Run("git", "-C", dir, "rev-parse", branch)
	if len(commits) != 2 || commits[0] != main || commits[1]+"\n" != pushed.Stdout {
		t.Errorf("commits cloned and pushed = %q, want %s, then %s", got, main, pushed.All())
	}
}

// npmRegistry returns the registry that this host's npm uses.
func npmRegistry(t *testing.T) *url.URL {
	t.Helper()
	cmd := exec.Command("npm", "config", "get", "registry")
	cmd.Dir = t.TempDir() // outside of any project
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("npm config get registry = %v, want nil", err)
	}
	u, err := url.Parse(strings.TrimSpace(string(out)))
	if err != nil || u.Hostname() == "" {
		t.Fatalf("npm registry = %q, %v, want a URL", out, err)
	}
	return u
}

func portOf(u *url.URL) string {
	switch {
	case u.Port() != "":
		return u.Port()
	case u.Scheme == "https":
		return "443"
	default:
		return "80"
	}
}
