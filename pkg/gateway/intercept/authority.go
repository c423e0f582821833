// Package intercept has what the gateway needs to read a guest's requests to hosts for which
// a secret is bound: a certificate authority, and the exchange of placeholders for secrets.
//
// It never dials, and it stores nothing. Values of secrets stay in memory; an authority can be
// marshalled with its key.
package intercept

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// Guests' clocks may be wrong by this much, in both directions.
	clockSkew = 48 * time.Hour
	// Some clients accept no leaf certificate that is valid for more than 398 days
	// (CA/Browser Forum, Baseline Requirements 6.3.2).
	leafLife = 200 * 24 * time.Hour
	caLife   = 10 * 365 * 24 * time.Hour
)

// Authority is the certificate authority of one session. Its certificate is limited to the
// session's hosts (RFC 5280, 4.2.1.10).
type Authority struct {
	hosts []string
	cert  *x509.Certificate
	key   *ecdsa.PrivateKey

	mu     sync.Mutex
	leaves map[string]*tls.Certificate
}

// NewAuthority makes an authority for hosts: canonical names, or *.ZONE for the names below a
// zone.
func NewAuthority(hosts []string) (*Authority, error) {
	if len(hosts) == 0 {
		return nil, fmt.Errorf("make certificate authority: no hosts")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	_, all4, _ := net.ParseCIDR("0.0.0.0/0")
	_, all6, _ := net.ParseCIDR("::/0")
	var domains []string
	for _, h := range hosts {
		domains = append(domains, strings.TrimPrefix(h, "*."))
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: "agent-sessionizer gateway"},
		NotBefore:    now.Add(-clockSkew), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage:                    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: domains,
		ExcludedIPRanges: []*net.IPNet{all4, all6},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	return &Authority{hosts: slices.Clone(hosts), cert: cert, key: key, leaves: map[string]*tls.Certificate{}}, nil
}

// savedAuthority is an authority as JSON, with DER in base64.
type savedAuthority struct {
	Hosts       []string `json:"hosts"`
	Certificate []byte   `json:"certificate"`
	Key         []byte   `json:"key"` // SEC 1
}

// MarshalJSON returns the authority with its private key.
func (a *Authority) MarshalJSON() ([]byte, error) {
	key, err := x509.MarshalECPrivateKey(a.key)
	if err != nil {
		return nil, err
	}
	return json.Marshal(savedAuthority{a.hosts, a.cert.Raw, key})
}

// UnmarshalJSON reads what MarshalJSON returned.
func (a *Authority) UnmarshalJSON(b []byte) error {
	var saved savedAuthority
	if err := json.Unmarshal(b, &saved); err != nil {
		return err
	}
	cert, err := x509.ParseCertificate(saved.Certificate)
	if err != nil {
		return err
	}
	key, err := x509.ParseECPrivateKey(saved.Key)
	if err != nil {
		return err
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return errors.New("the key is not the certificate's")
	}
	*a = Authority{hosts: saved.Hosts, cert: cert, key: key, leaves: map[string]*tls.Certificate{}} //nolint:govet // a is not in use yet
	return nil
}

// PEM returns the authority's certificate, which the guest must trust.
func (a *Authority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// Covers reports whether host is one of the authority's hosts, or *.ZONE one of its zones.
func (a *Authority) Covers(host string) bool {
	return slices.ContainsFunc(a.hosts, func(h string) bool { return Matches(h, host) })
}

// Matches reports whether a host, or a wildcard, is one of those that pattern means: a name, or
// *.ZONE.
func Matches(pattern, host string) bool {
	zone, wild := strings.CutPrefix(pattern, "*")
	return pattern == host || wild && strings.HasSuffix(host, zone)
}

// Certificate returns the certificate for one of the authority's hosts.
func (a *Authority) Certificate(host string) (*tls.Certificate, error) {
	if !a.Covers(host) {
		return nil, fmt.Errorf("no certificate for %q", host)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.leaves[host]; c != nil && time.Until(c.Leaf.NotAfter) > clockSkew {
		return c, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: host[:min(len(host), 64)]}, // the limit of RFC 5280
		DNSNames:     []string{host},
		NotBefore:    now.Add(-clockSkew), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	c := &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key, Leaf: leaf}
	a.leaves[host] = c
	return c, nil
}

func serial() *big.Int {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // crypto/rand documents that it never fails
	b[0] &= 0x7f        // positive
	return new(big.Int).SetBytes(b)
}
