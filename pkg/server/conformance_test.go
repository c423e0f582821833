//go:build conformance

package server

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// scenarios are those of the suite that apply to every server. The others call tools,
// resources and prompts that only the suite's own example server has.
var scenarios = []string{"server-initialize", "ping", "tools-list", "dns-rebinding-protection"}

// TestMCPConformance runs the protocol's own suite against serve.
func TestMCPConformance(t *testing.T) {
	dir, err := filepath.Abs("../../test/conformance")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := command(dir, "npm", "ci", "--silent"); err != nil {
		t.Fatalf("npm ci = %v; install nodejs and npm\n%s", err, out)
	}
	node := node(t, dir)
	r := newRig(t, Limits{})
	// The suite sends no token, and names the proxy as its host.
	var proxy *httptest.Server
	proxy = httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
		p.Out.URL.Scheme, p.Out.URL.Host = "http", r.addr
		mine := func(text string) string { return strings.ReplaceAll(text, proxy.Listener.Addr().String(), r.addr) }
		p.Out.Host = mine(p.In.Host)
		if o := p.In.Header.Get("Origin"); o != "" {
			p.Out.Header.Set("Origin", mine(o))
		}
		p.Out.Header.Set("Authorization", "Bearer "+r.token[ops.Admin])
	}})
	defer proxy.Close()
	for _, name := range scenarios {
		t.Run(name, func(t *testing.T) {
			out, err := command(t.TempDir(), node, filepath.Join(dir, "node_modules/@modelcontextprotocol/conformance/dist/index.js"),
				"server", "--url", proxy.URL+mcpPath, "--scenario", name)
			if passed := regexp.MustCompile(`Passed: (\d+)/(\d+)`).FindStringSubmatch(out); err != nil || passed == nil || passed[1] != passed[2] || passed[1] == "0" {
				t.Errorf("scenario %s = %v, want all checks passed\n%s", name, err, out)
			}
		})
	}
	if resp, err := http.Post(proxy.URL+mcpPath, "application/json", strings.NewReader("{")); err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("POST of broken JSON = %v, %v, want status 400", resp, err)
	}
}

func command(dir string, argv ...string) (string, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// node returns a Node.js that the suite runs on: the system's, or a newer one from npm.
func node(t *testing.T, dir string) string {
	t.Helper()
	out, err := command(dir, "node", "--print", "process.versions.node.split('.')[0] + ' ' + process.platform + '-' + process.arch")
	if err != nil {
		t.Fatalf("node = %v; install nodejs and npm\n%s", err, out)
	}
	version, platform, _ := strings.Cut(strings.TrimSpace(out), " ")
	if n, err := strconv.Atoi(version); err == nil && n >= 20 {
		return "node"
	}
	if out, err := command(dir, "npm", "install", "--silent", "--no-save", "node-"+platform+"@22"); err != nil {
		t.Fatalf("npm install node-%s = %v; install Node.js 20 or later\n%s", platform, err, out)
	}
	return filepath.Join(dir, "node_modules", "node-"+platform, "bin", "node")
}
